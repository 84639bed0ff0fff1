"""On models cut by channels, also beside copies."""

from __future__ import annotations

from widefield.plans import Plan

from ..plans import Layout
from ..program import Habit, Program

OF_CHANNELS: list[tuple[Program, Layout]] = [
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
    # A layer of one channel lays out what it makes otherwise than others do, and ranks added it up as it lay, in silence.
    (
        Program(
            (2, 3, 3, 5),
            {"m0": "nn.Conv2d(3, 3, 1)", "m1": "nn.Conv2d(3, 3, 3, padding=1)"},
            ("a = self.m0(x).relu()", "b = self.m1(a)"),
            ("b",),
            Habit(channels_last=True),
        ),
        Layout(Plan(channel=2), None, False, True),
    ),
    # Parts of weights were kept row-major, and dropout drew in the order of what a convolution makes with such a weight.
    (
        Program(
            (2, 2, 4, 7),
            {"m1": "nn.Conv2d(2, 2, 3, padding=1)"},
            ("a = x.contiguous()", "b = F.dropout(self.m1(a), 0.3)"),
            ("b",),
            Habit(channels_last=True),
        ),
        Layout(Plan(channel=2), None, False, True),
    ),
    # Ranks with unequal parts of channels put an operation into unequal stages, and waited for each other.
    (
        Program(
            (1, 1, 6, 11),
            {"p0": "nn.Parameter(torch.randn(3, 1, 5, 5))", "m1": "nn.Conv2d(2, 4, (3, 2), padding='same')"},
            (
                "v2 = F.conv2d(x, self.p0, None, 1, 'same', (1, 1), 1)",
                "v3 = F.max_pool2d(v2, 2, (3, 3), 0, (1, 1), True)",
                "v4 = v3.diff(dim=-3)",
                "v7 = self.m1(v4)",
            ),
            ("v7",),
        ),
        Layout(Plan(channel=2, stage=2)),
    ),
    # Stacks of images with channels last, group norms of one sample and draws in place lay otherwise in a capture.
    (
        Program(
            (1, 4, 11, 5),
            {"m0": "nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(1, 4), nn.GroupNorm(1, 4))"},
            ("v1 = F.dropout(self.m0(x), 0.5)", "v2 = F.dropout(torch.stack(x.unbind(2)[::-1], 2), 0.5) + v1"),
            ("v2",),
            Habit(channels_last=True),
        ),
        Layout(Plan(channel=2)),
    ),
    # What a model makes for its batch, of no sample, was given to each copy whole.
    (
        Program(
            (2, 4, 11),
            {"m0": "nn.Conv1d(4, 4, 3, padding=1)", "m2": "nn.Linear(12, 2)"},
            ("v1 = self.m0(x)", "v6 = F.interpolate(torch.zeros_like(v1), size=(12,))", "v7 = self.m2(v6)"),
            ("v7",),
        ),
        Layout(Plan(replicate=2, channel=2), None, False, True),
    ),
    # A capture drew rrelu's slopes into memory in another order than torch's kernel takes for granted.
    (
        Program(
            (1, 3, 9, 6),
            {"p0": "nn.Parameter(torch.randn(1, 1))"},
            ("v5 = F.rrelu(x.flatten(2).transpose(1, 2) * self.p0, 0.1, 0.3, self.training)",),
            ("v5",),
        ),
        Layout(Plan(channel=2)),
    ),
    # Numbers drawn around what learns have zeros for a gradient; captured they had none, which nothing could be asked of.
    (
        Program(
            (1, 2, 6, 11),
            {"m1": "nn.Linear(11, 1, True)"},
            ("v3 = torch.normal(x, 0.1)", "v5 = self.m1(v3)"),
            ("v5",),
            Habit(penalty=True),
        ),
        Layout(Plan(channel=2)),
    ),
    # A write to a part while gradients were off took the gradient of the whole away.
    (
        Program(
            (2, 2, 6, 5),
            {"m0": "nn.Conv2d(2, 3, 3, padding=1)"},
            ("v1 = self.m0(x)", "with torch.no_grad():", "    v1[:, 1:].mul_(2)", "v2 = v1 * x.mean()"),
            ("v2",),
        ),
        Layout(Plan(channel=2)),
    ),
    # The same of an rrelu that draws nothing, which is taken apart into a leaky_relu.
    (
        Program(
            (1, 3, 8, 7),
            {"m2": "nn.Sequential(nn.Conv2d(7, 7, 3, padding=1), nn.Dropout(0.3))"},
            ("v3 = torch.permute(x, (0, 3, 1, 2))", "v4 = F.rrelu(v3, training=False)", "v5 = self.m2(v4)"),
            ("v5",),
        ),
        Layout(Plan(channel=2)),
    ),
    # Where a tile's cut lies behind a view of channels with pixels depends on how many channels a rank has.
    (
        Program(
            (1, 3, 4, 7),
            {
                "m0": "nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Identity())",
                "p1": "nn.Parameter(torch.randn(3, 1, 1))",
            },
            ("v1 = self.m0(x)", "v1.flatten(1).square_()", "v5 = v1 * self.p1.expand_as(v1).sigmoid()"),
            ("v5",),
        ),
        Layout(Plan(space=[1, 2], channel=2), None, False, True),
    ),
    # The features of a layer are the pixels of a convolution in groups behind it, and were looked at as its groups.
    (
        Program(
            (1, 4, 10, 3),
            {
                "m2": "nn.RNN(3, 1, 1, batch_first=True, bidirectional=False)",
                "p3": "nn.Parameter(torch.randn(4))",
                "p4": "nn.Parameter(torch.randn(4, 20, 3))",
            },
            ("v7 = self.m2(x.flatten(1, -2))[0]", "v9 = F.conv1d(v7, self.p4, self.p3, 1, 'same', 1, 2)"),
            ("v9",),
        ),
        Layout(Plan(channel=2), None, False, True),
    ),
    # Of what a sort gives the places alone are read, and its values were asked what comes after them.
    (
        Program(
            (1, 4, 6, 4),
            {"p0": "nn.Parameter(torch.randn(4))", "p1": "nn.Parameter(torch.randn(4, 4, 3, 5))"},
            ("v1 = F.conv2d(x, self.p1, self.p0, 2, 3, 1, 1)", "v3 = v1.gather(-1, v1.detach().argsort(-1))"),
            ("v3",),
        ),
        Layout(Plan(channel=2, bucket_mib=0.0001), None, False, True),
    ),
    (
        Program(
            (1, 3, 17),
            {"m0": "nn.Conv1d(3, 4, (1,), 1, 'same', 1, 1, True, 'zeros')"},
            ("v1 = self.m0(x)", "v2 = v1.scatter_reduce(-3, v1.detach().argsort(-3), v1.sin(), 'amax')"),
            ("v2",),
        ),
        Layout(Plan(channel=2), None, False, True),
    ),
]
