"""On copies, shards and stages of a model."""

from __future__ import annotations

from widefield.plan import Plan

from ..plans import Layout
from ..program import Habit, Program

OF_MODELS: list[tuple[Program, Layout]] = [
    # Second derivatives ended where copies that share a batch take their rows, in silence.
    (
        Program(
            (2, 2, 4, 5),
            {"p0": "nn.Parameter(torch.randn(3, 2, 1, 1))"},
            (
                "v1 = F.pad(x, [3, 1, 3, 3], mode='circular')",
                "v2 = v1.softmax(-4)",
                "v3 = F.conv2d(v2, self.p0, None, (3, 1), 'valid', (1, 1), 1)",
                "v4 = F.max_pool2d(v3, (4, 9))",
            ),
            ("v4",),
            Habit(penalty=True),
        ),
        Layout(Plan(replicate=2)),
    ),
    # A copy without samples could not tell which outputs belong to samples.
    (
        Program(
            (2, 4, 12),
            {"p0": "nn.Parameter(torch.randn(1, 4, 1))", "m1": "nn.GroupNorm(1, 1, 1e-2, True)"},
            ("v2 = F.conv1d(x, self.p0, None, 1, 'valid', 1, 1)", "v4 = self.m1(v2)"),
            ("v4",),
        ),
        Layout(Plan(replicate=2, shard=2, sharding={"zero": 2})),
    ),
    # Stages cut a batch into micro-batches though its samples meet.
    (
        Program(
            (2, 2, 11, 4),
            {"m0": "nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.GroupNorm(1, 2), nn.Identity())"},
            ("v1 = self.m0(x)", "v2 = v1 * (v1 > 0).double().mean()"),
            ("v2",),
        ),
        Layout(Plan(stage=2)),
    ),
    # A trial pass left its buffers behind where a forward replaces them.
    (
        Program(
            (3, 1, 10, 9),
            {"b0": "torch.zeros(())", "m1": "nn.Conv2d(1, 1, 3, 1, 'valid', (1, 2), 1, True, 'circular')"},
            (
                "self.b0 = wf_whole(self.b0 * 0.9 + x.detach().mean() * 0.1)",
                "v2 = x - self.b0",
                "v3 = self.m1(v2)",
                "v4 = F.normalize(v3, p=1, dim=0, eps=0.1)",
            ),
            ("v4",),
        ),
        Layout(Plan(replicate=2), None, True),
    ),
    # `F.batch_norm` writes to buffers without a word, and the first forward of copies left that behind.
    (
        Program(
            (3, 2, 13),
            {"m1": "nn.Conv1d(2, 1, 1, 2, 'valid', (1,), 1, False, 'zeros')", "b2": "torch.zeros(1)", "b3": "torch.ones(1)"},
            (
                "v2 = self.m1(x)",
                "v4 = F.batch_norm(v2, self.b2, self.b3, training=self.training, eps=1e-2, momentum=0.2)",
            ),
            ("v4",),
        ),
        Layout(Plan(replicate=2)),
    ),
    # The mean over all batches of a BatchNorm took its weight in float32.
    (
        Program((3, 3, 6, 8), {"m2": "nn.BatchNorm2d(3, 1e-2, None, True, True)"}, ("v4 = self.m2(x)",), ("v4",)),
        Layout(Plan(shard=2, sharding={"zero": 2})),
    ),
    # A state of stages mixed up tensors that lie in memory in another order than a new model's.
    (
        Program(
            (1, 4, 9, 4),
            {
                "m0": "parametrizations.orthogonal(nn.Conv2d(4, 2, (1, 3), (1, 1), 3, 2, 1, False, 'circular'))",
                "m1": "nn.Conv2d(2, 1, 5, 1, 'valid', 1, 1, True, 'reflect')",
            },
            ("v1 = self.m0(x)", "v3 = self.m1(v1)"),
            ("v3",),
        ),
        Layout(Plan(stage=2)),
    ),
    # A batch norm over copies had no second derivative.
    (
        Program(
            (2, 2, 10, 9),
            {
                "m1": "nn.ConvTranspose2d(2, 3, 1, 1, (0, 1), 0, 1, True, 1)",
                "m2": "nn.BatchNorm2d(3, 1e-2, None, True, True)",
            },
            ("v5 = self.m1(x)", "v10 = self.m2(v5)", "v11 = F.adaptive_avg_pool2d(v10, (3, 1))"),
            ("v11",),
            Habit(penalty=True),
        ),
        Layout(Plan(replicate=2)),
    ),
    # What is of all samples was taken for a copy's where, by chance, a copy alone gives the same.
    (
        Program(
            (2, 2, 8, 6),
            {"m0": "nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Identity(), nn.BatchNorm2d(2))"},
            (
                "v1 = self.m0(x)",
                "v2 = F.unfold(v1, (3, 1), dilation=(2, 1))",
                "v4 = v2.amax([-1, 1, -3], keepdim=True)",
            ),
            ("v4", "v1", "v2"),
        ),
        Layout(Plan(replicate=2)),
    ),
    # What stages gave with several rows for a sample was cut as if it had one, where a micro-batch was filled up.
    (
        Program(
            (5, 3, 5, 7),
            {
                "p0": "nn.Parameter(torch.randn(3))",
                "p1": "nn.Parameter(torch.randn(5, 3))",
                "m2": "nn.Conv2d(3, 3, (2, 1), 1, 'valid', (1, 1), 3, True, 'circular')",
            },
            (
                "v1 = F.pad(x, [-1, -1, -1, -1], mode='reflect')",
                "v2 = torch.addmm(self.p0, v1.flatten(0, -2), self.p1, beta=0.7, alpha=1.2)",
                "v4 = self.m2(v1)",
            ),
            ("v4", "v2"),
        ),
        Layout(Plan(stage=2)),
    ),
    # Layers that were frozen when the model was cut into stages, and are not any more, did not learn.
    (
        Program(
            (2, 3, 8, 8),
            {"m0": "nn.Conv2d(3, 3, 3, 1, 1)", "m1": "nn.Conv2d(3, 3, 3)"},
            ("v1 = self.m0(x).tanh()", "v2 = self.m1(v1) * 0.1"),
            ("v2",),
            Habit(frozen=("m0",), late=True),
        ),
        Layout(Plan(stage=2)),
    ),
    # Samples met in a count that was the same for each copy in the first step.
    (
        Program(
            (2, 4, 5, 4),
            {"m0": "nn.Conv2d(4, 3, 1, (1, 3), 'valid', 1, 1, False, 'circular')"},
            ("v1 = self.m0(x)", "v3 = v1 * (v1 > 0).double().mean()"),
            ("v3",),
        ),
        Layout(Plan(replicate=2)),
    ),
    # Ranks that had seen enough left the others alone with a message of theirs.
    (
        Program(
            (2, 3, 3, 4),
            {"m0": "nn.MultiheadAttention(3, 1, batch_first=True)"},
            (
                "v1 = F.pad(x, [1, 3, 3, 2], mode='circular')",
                "v2 = v1.flatten(2).transpose(1, 2)",
                "v3 = self.m0(v2, v2, v2, need_weights=True)[0]",
            ),
            ("v3",),
        ),
        Layout(Plan(replicate=2, space=[2, 1])),
    ),
    # Torch's own synchronized BatchNorm refuses tensors of the CPU.
    (
        Program(
            (3, 2, 6, 5),
            {"m0": "nn.Conv2d(2, 3, 3, padding=1)", "m1": "nn.SyncBatchNorm(3)"},
            ("v1 = self.m0(x)", "v2 = self.m1(v1)"),
            ("v2",),
        ),
        Layout(Plan(replicate=2)),
    ),
    # What `any` takes together lay by columns, and its step hid that samples meet.
    (
        Program(
            (2, 4, 3, 6),
            {"m0": "nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(1, 4))"},
            ("v1 = self.m0(x)", "v2 = v1 + (v1 > 1).any()"),
            ("v2",),
        ),
        Layout(Plan(replicate=2)),
    ),
    # Rows that no message was needed for were taken together, out of evaluation mode's sight.
    (
        Program(
            (2, 3, 7, 5),
            {
                "m0": "nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.LeakyReLU(0.1, inplace=True), "
                "nn.BatchNorm2d(3))"
            },
            ("v1 = self.m0(x)", "v2 = (v1 > 0).any(0, keepdim=True).double() * v1"),
            ("v2",),
            Habit(train=False),
        ),
        Layout(Plan(replicate=2)),
    ),
    # Copies with one sample each did not know that samples come first in channels-last memory.
    (
        Program(
            (3, 3, 5, 6),
            {"m0": "nn.Conv2d(3, 4, 3, padding=1)", "m1": "nn.GroupNorm(2, 4)", "m2": "nn.Conv2d(4, 2, 3)"},
            (
                "v1 = F.dropout(self.m0(x).contiguous(memory_format=torch.channels_last), 0.2)",
                "v2 = self.m1(v1)",
                "v3 = self.m2(v2) * v2.mean()",
            ),
            ("v3",),
        ),
        Layout(Plan(replicate=3)),
    ),
    # Every micro-batch has a first sample; the batch has one.
    (
        Program(
            (2, 4, 5, 10),
            {"m0": "nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(1, 4), nn.LeakyReLU(0.1, inplace=True))"},
            ("v1 = self.m0(x)", "v4 = v1 + 0", "v4[:1].relu_()"),
            ("v4",),
        ),
        Layout(Plan(stage=2)),
    ),
    # One sample per copy does not tell where samples lie in memory, and chance was drawn in another order.
    (
        Program(
            (2, 1, 13),
            {"p2": "nn.Parameter(torch.randn(3, 1))", "m3": "nn.Dropout(0.1)"},
            ("v3 = torch.fmin(x, self.p2)", "v4 = v3.flatten(2).transpose(1, 2)", "v5 = self.m3(v4)"),
            ("v5",),
        ),
        Layout(Plan(replicate=2)),
    ),
    # One sample has no deviation: what is no number was not seen to differ from what all samples give.
    (
        Program(
            (2, 2, 7),
            {"m0": "nn.Conv1d(2, 1, 3, padding=1)", "p2": "nn.Parameter(torch.randn(1, 1))"},
            (
                "v1 = self.m0(x)",
                "v4 = v1 * F.linear(v1.flatten(2).mean(2), self.p2).sigmoid()[:, :, None, None]",
                "v6 = v4.std([-4], keepdim=False)",
            ),
            ("v6",),
        ),
        Layout(Plan(replicate=2)),
    ),
    # One number of all samples, picked and not added up.
    (
        Program(
            (2, 1, 3, 3),
            {"p0": "nn.Parameter(torch.randn(2, 1, 2, 2))"},
            ("a = F.conv2d(x, self.p0)", "b = torch.quantile(a.mean([1, 2, 3]), 0.3)"),
            ("b",),
        ),
        Layout(Plan(shard=2)),
    ),
    # What one device does to the first sample of a batch, each copy did to its own first, where only statistics tell.
    (
        Program(
            (2, 3, 8, 11),
            {"m1": "nn.BatchNorm2d(3, 1e-2, 0.3, True, True)", "p3": "nn.Parameter(torch.randn(11))"},
            ("v2 = x + 0", "v2[:1].clamp_(-0.7, 0.7)", "v4 = self.m1(v2)", "v6 = torch.eq(v4, self.p3).double() + self.p3"),
            ("v6",),
        ),
        Layout(Plan(replicate=2)),
    ),
    # Copies weighed images by how many each has, which only the statistics of a BatchNorm behind it tell.
    (
        Program(
            (4, 3, 6, 5),
            {"m0": "nn.Conv2d(3, 3, 3)", "m1": "nn.BatchNorm2d(3, 1e-14)"},
            ("v1 = self.m0(x) * x.shape[0]", "v2 = self.m1(v1).sin()"),
            ("v2",),
        ),
        Layout(Plan(replicate=2)),
    ),
    # A gradient that a forward takes through a unit of weights in parts gave those weights one of zeros.
    (
        Program(
            (2, 4, 5, 6),
            {"m0": "nn.Conv2d(4, 2, (2, 1), 3)", "m1": "nn.Conv2d(2, 2, 1)"},
            (
                "v1 = self.m0(x)",
                "with torch.enable_grad():\n    v3 = v1.detach().requires_grad_()\n"
                "    v4, = torch.autograd.grad(self.m1(v3).square().sum(), v3)",
                "v5 = v1 + v4",
            ),
            ("v5",),
        ),
        Layout(Plan(shard=2, sharding={"zero": 2}), as_if_large=True),
    ),
    # A BatchNorm of what is not cut, which copies on rows all hold, counted it once for each.
    (
        Program(
            (2, 3, 6, 6),
            {
                "m0": "nn.LSTM(6, 3, 1, batch_first=True)",
                "m1": "nn.Conv1d(18, 4, 1)",
                "m2": "nn.BatchNorm1d(4)",
            },
            ("v2 = self.m0(x.flatten(1, -2))[0]", "v3 = self.m1(v2)", "v4 = self.m2(v3)"),
            ("v4",),
        ),
        Layout(Plan(replicate=2)),
    ),
    # Outputs that hold samples along another dim than the first were those of all copies.
    (
        Program(
            (3, 3, 4, 5),
            {"m0": "nn.Conv2d(3, 5, 3, padding=1)", "m1": "nn.Dropout(0.5)"},
            ("v1 = self.m1(self.m0(x))", "v2 = v1.flatten(2).permute(2, 0, 1)"),
            ("v2",),
        ),
        Layout(Plan(replicate=2)),
    ),
    # Recomputation set a switch of the whole process around a block, and ranks that are threads set it for each other.
    (
        Program(
            (3, 2, 9, 3),
            {
                "m0": "nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Dropout(0.3), nn.Dropout(0.3))",
                "m1": "nn.Conv2d(2, 2, 3, padding=1)",
            },
            ("v1 = self.m0(x)", "v5 = checkpoint(lambda t: self.m1(t).sin() + t.mean(), v1, use_reentrant=False)"),
            ("v5",),
        ),
        Layout(Plan(replicate=2, recompute={}), None, False, False),
    ),
]
