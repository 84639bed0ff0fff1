"""On stages of a model."""

from __future__ import annotations

from widefield.plans import Plan

from ..plans import Layout
from ..program import Habit, Program

OF_STAGES: list[tuple[Program, Layout]] = [
    # Torch's split of a backward lost weights that meet no way to an input, added to gradients that repeat one number, and took
    # from the second half what the loss had saved.
    *(
        (Program(shape, members, lines, outputs), Layout(Plan(stage=2, pipeline={"schedule": "zero_bubble"})))
        for shape, members, lines, outputs in (
            (
                (1, 2, 9, 11),
                {
                    "m0": "nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1), nn.ReLU())",
                    "p1": "nn.Parameter(torch.randn(2, 2))",
                },
                (
                    "v1 = self.m0(x)",
                    "v2 = torch.empty_like(v1).fill_(0.2)",
                    "v5 = v2 * F.linear(v2.mean((2, 3)), self.p1)[:, :, None, None]",
                ),
                ("v5",),
            ),
            (
                (2, 2, 9, 11),
                {
                    "m0": "nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1), nn.ReLU())",
                    "p1": "nn.Parameter(torch.randn(2, 2))",
                },
                ("v1 = self.m0(x)", "v5 = v1 * self.p1.sum() * 0.1"),
                ("v5",),
            ),
            (
                (1, 3, 9, 10),
                {"m0": "nn.Conv2d(3, 4, 2)", "m1": "nn.Linear(10, 3)"},
                ("v1 = self.m0(x)", "v2 = self.m1(x)"),
                ("v1", "v2"),
            ),
        )
    ),
    # Behind rows of tokens times samples, samples were looked for among tokens.
    (
        Program(
            (2, 3, 7, 8),
            {"m0": "nn.Conv2d(3, 3, 1)", "m1": "nn.MultiheadAttention(3, 1, batch_first=True)"},
            (
                "v1 = self.m0(x)",
                "v2 = v1.flatten(2).transpose(1, 2)",
                "v3 = self.m1(v2, v2, v2, need_weights=False)[0]",
                "v5 = v3.cummin(-3)[0]",
            ),
            ("v5",),
        ),
        Layout(Plan(stage=2)),
    ),
    # A tensor like a part of one in channels has no part of its own, and its samples were not seen.
    (
        Program(
            (2, 2, 11, 11),
            {"m0": "nn.Conv2d(2, 2, (5, 3), (1, 3), 1)", "p1": "nn.Parameter(torch.randn(1, 2, 3, 3))"},
            ("v1 = self.m0(x)", "v2 = torch.zeros_like(v1)", "v2.flatten()[:3].add_(0.1)", "v4 = F.conv2d(v2, self.p1)"),
            ("v4",),
        ),
        Layout(Plan(channel=2, stage=2)),
    ),
    # Torch made two groups of weights that meet the way to the input at the same places, as the order of a set fell.
    (
        Program(
            (1, 1, 10, 11),
            {
                "m0": "nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Identity(), nn.ReLU(inplace=True), nn.ReLU())",
                "m1": "nn.Embedding(5, 2)",
                "m2": "nn.Conv3d(1, 3, 1, (1, 3, 1), 'valid', (1, 2, 1), 1, False, 'replicate')",
                "p3": "nn.Parameter(torch.randn(4, 3, 3, 3, 3))",
            },
            (
                "v1 = self.m0(x)",
                "v2 = self.m1((v1.detach() > 0).long())",
                "v4 = self.m2(v2)",
                "v5 = F.conv3d(v4, self.p3, None, 1, 'same', (1, 1, 1), 1)",
            ),
            ("v5", "v4"),
        ),
        Layout(Plan(stage=2, pipeline={"schedule": "zero_bubble"})),
    ),
    # A weight that is turned and sent on had the memory for a gradient, into which the next pass was received.
    (
        Program(
            (1, 2, 8),
            {"m1": "nn.LayerNorm([2, 8], 1e-2, True)", "m2": "nn.Linear(8, 3, True)", "m3": "nn.Conv1d(2, 2, 1, padding=0)"},
            ("v2 = self.m1(x)", "v3 = self.m2(v2)", "v4 = torch.cat([self.m3(part) for part in v3.split(1)])"),
            ("v4",),
            Habit(passes=2),
        ),
        Layout(Plan(stage=2, pipeline={"micro_batches": 1, "schedule": "interleaved"})),
    ),
    # Where micro-batches do not divide a batch, outputs that hold samples along another dim were cut along their first.
    (
        Program(
            (5, 4, 5, 5),
            {"m0": "nn.Conv2d(4, 3, 2)", "m1": "nn.Conv2d(3, 4, 3)"},
            ("v1 = self.m0(x)", "v2 = self.m1(v1)", "v3 = v2.flatten(1).t()"),
            ("v3", "v1"),
        ),
        Layout(Plan(stage=2, pipeline={"micro_batches": 2})),
    ),
    # A GroupNorm over samples that lie along another dim than the first was taken for one that goes row by row.
    (
        Program(
            (2, 1, 3, 6),
            {"m0": "nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 1))", "m1": "nn.GroupNorm(1, 1, 1e-2, False)"},
            ("v1 = self.m0(x)", "v3 = v1.transpose(2, 0)", "v4 = self.m1(v3)"),
            ("v4",),
        ),
        Layout(Plan(stage=2, pipeline={"schedule": "gpipe"})),
    ),
]
