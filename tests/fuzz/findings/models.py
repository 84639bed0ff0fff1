"""On copies, shards, channels and stages of a model."""

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
    # Integers that are drawn have no derivative, which torch says in the backward.
    (
        Program(
            (1, 1, 5, 10),
            {"m0": "nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(inplace=True))"},
            ("v1 = self.m0(x)", "v2 = v1 + torch.randint_like(v1, 3) * 0.1"),
            ("v2",),
        ),
        Layout(Plan(channel=2)),
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
    # A dim of no channels was asked what it divides.
    (
        Program(
            (1, 3, 3, 2, 3),
            {"m1": "nn.ConvTranspose3d(3, 2, (1, 4, 4), (3, 3, 1), 2, (1, 0, 0), 1, False, (1, 1, 2))"},
            (
                "v3 = torch.zeros_like(x)",
                "v3[0] = x[-1].sin()",
                "v5 = self.m1(v3)",
                "v6 = torch.gradient(v5, dim=1)[0]",
            ),
            ("v6",),
        ),
        Layout(Plan(channel=2)),
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
    # The rows of a product were returned as well as seen as an image.
    (
        Program(
            (3, 2, 5),
            {"m0": "nn.Conv1d(2, 4, 5, (2,), 'valid', (1,), 1, False, 'circular')", "p1": "nn.Parameter(torch.randn(4, 4))"},
            (
                "v1 = self.m0(x)",
                "v2 = torch.addmm(self.p1[0], v1.flatten(2).transpose(1, 2).flatten(0, 1), self.p1)",
                "v3 = v2.reshape([3, 1, 4])",
            ),
            ("v3", "v2", "v3"),
        ),
        Layout(Plan(channel=2)),
    ),
    # Torch's `resize_as` has no derivative, which a template that learns asks for.
    (
        Program(
            (1, 2, 10),
            {"m0": "nn.Conv1d(2, 4, 3, 1, 'same', 1, 1, True, 'replicate')"},
            ("v3 = torch.empty_like(x).fill_(0.2)", "v3.resize_as_(x)", "v5 = self.m0(v3)"),
            ("v5",),
        ),
        Layout(Plan(channel=2)),
    ),
    # A roll of all pixels in one row takes them in order, whatever their order in memory.
    (
        Program(
            (1, 1, 6),
            {"m0": "nn.Conv1d(1, 4, (3,), (1,), 0, 1, 1, False, 'circular')"},
            ("v1 = self.m0(x)", "v4 = v1.permute(*range(v1.ndim)[::-1])", "v5 = torch.roll(v4, 1)"),
            ("v5",),
        ),
        Layout(Plan(channel=2)),
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
    # Gradients that ranks exchange had no gradient of their own, so weights that are cut learned nothing of a penalty.
    (
        Program(
            (2, 4, 8, 8),
            {"m0": "nn.Conv2d(4, 32, 3)", "m1": "nn.Linear(32 * 36, 3)"},
            ("v1 = self.m0(x).sin()", "v2 = self.m1(v1.flatten(1)) * 0.1"),
            ("v2",),
            Habit(penalty=True),
        ),
        Layout(Plan(channel=2)),
    ),
    # A weight times itself is one part, where each factor wanted another; a squeeze of a part took its one channel, too; draws
    # that depend on pixels were made for others, or in another order in memory.
    *(
        (
            Program((2, 3, 6, 5), {"m0": "nn.Conv2d(3, 2, 3)", "p1": "nn.Parameter(torch.randn(2, 2))"}, lines, ("v2",)),
            Layout(Plan(channel=2), None, False, True),
        )
        for lines in (
            ("v1 = self.m0(x)", "v2 = v1 * (self.p1 @ self.p1).mean() * 0.1 + self.p1.mean()"),
            ("v1 = self.m0(x[:1]).squeeze()", "v2 = (v1 * 2)[None]"),
            ("v1 = self.m0(x)", "v2 = F.rrelu(v1, 0.1, 0.3, True)"),
            ("v1 = self.m0(x).transpose(1, 2)", "v2 = v1 + torch.rand_like(v1)"),
        )
    ),
    # What a graph was captured for was looked up at the second call, when a weight had come to learn in between.
    (
        Program(
            (1, 3, 6, 8),
            {"m0": "nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.SiLU())", "p2": "nn.Parameter(torch.randn(3, 3, 2, 1))"},
            ("v1 = self.m0(x)", "v3 = v1 + self.p2.flatten()[0]"),
            ("v3",),
            Habit(frozen=("p2",), late=True),
        ),
        Layout(Plan(channel=2), None, False, True),
    ),
    # Copies with a sample more chose to hold other channels, so that their weights were not of one size.
    (
        Program(
            (5, 4, 3, 10),
            {"m0": "nn.Conv2d(4, 4, 3, padding=1)"},
            ("v5 = torch.cat([self.m0(x[:1]), self.m0(x[1:])]) if len(x) > 1 else self.m0(x)",),
            ("v5",),
        ),
        Layout(Plan(replicate=2, channel=2), None, False, True),
    ),
    # Writes through views with their dims in another order changed the order in memory of what they show, where it is captured.
    *(
        (
            Program(
                (2, 3, 8, 6),
                {"m0": "nn.Conv2d(3, 3, 1)"},
                ("v1 = x * 1", write, "v2 = F.dropout(v1, 0.3)", "v3 = self.m0(v2)"),
                ("v3",),
            ),
            Layout(Plan(channel=2), None, False, True),
        )
        for write in (
            "v1.transpose(1, 3)[:, 0].mul_(0.5)",
            "v1.permute(0, 2, 3, 1)[..., :2].mul_(0.5)",
            "v1.movedim(1, -1).copy_(x.movedim(1, -1) * 2)",
        )
    ),
    # A captured view wants an order in memory that kernels, and messages of parts, do not keep.
    (
        Program(
            (2, 4, 9),
            {"m1": "nn.TransformerEncoderLayer(4, 1, 5, 0.0, batch_first=True)"},
            ("v6 = self.m1(x.flatten(2).transpose(1, 2))",),
            ("v6",),
        ),
        Layout(Plan(channel=3), None, False, True),
    ),
]
