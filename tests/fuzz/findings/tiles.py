"""On images cut into tiles, in space or in time."""

from __future__ import annotations

from widefield.plans import Plan

from ..plans import Layout
from ..program import Habit, Program

OF_TILES: list[tuple[Program, Layout]] = [
    # An output that reads no pixel hid those behind it that need a halo: transposed, of stride 2 with a kernel of 1.
    (
        Program(
            (1, 3, 9, 5),
            {"m1": "nn.ConvTranspose2d(3, 3, (1, 4), 2, 2, (1, 1), 1, False, (2, 1))"},
            ("v3 = self.m1(x)",),
            ("v3",),
        ),
        Layout(Plan(space=[4, 1]), ((0, 2, 7, 8, 9), (0, 5))),
    ),
    # Circular padding had no second derivative.
    (
        Program(
            (1, 2, 3, 2, 2),
            {"m0": "nn.Conv3d(2, 2, 2, (3, 1, 1), 2, (1, 1, 1), 1, True, 'circular')"},
            ("v1 = self.m0(x)", "v2 = F.adaptive_avg_pool3d(v1, 1)"),
            ("v2",),
            Habit(penalty=True),
        ),
        Layout(Plan(space=[2, 1, 1])),
    ),
    # Ranks packed messages unlike each other where one of them had less to move.
    (
        Program(
            (1, 3, 5, 4, 2),
            {"m1": "nn.Conv3d(3, 1, (3, 3, 3), 1, 'same', (2, 2, 1), 1, True, 'circular')"},
            ("v4 = self.m1(x)",),
            ("v4",),
        ),
        Layout(Plan(space=[3, 1, 1])),
    ),
    (
        Program(
            (4, 1, 10),
            {"p0": "nn.Parameter(torch.randn(1))", "p1": "nn.Parameter(torch.randn(1, 1, 3))"},
            ("v1 = F.conv1d(x, self.p1, self.p0, 1, 'same', (1,), 1)", "v2 = torch.roll(v1, 1)"),
            ("v2",),
        ),
        Layout(Plan(space=[3])),
    ),
    # The gradient of a bias left out pixels that no input reaches, where the image wants no gradient.
    (
        Program(
            (2, 2, 11, 8),
            {"m1": "nn.ConvTranspose2d(1, 3, (1, 1), (3, 1), 0, 0, 1, True, 1)"},
            ("v4 = x[:, :1].detach()", "v6 = self.m1(v4)"),
            ("v6",),
        ),
        Layout(Plan(space=[2, 1])),
    ),
    (
        Program((1, 4, 8, 9), {"m3": "nn.SyncBatchNorm(4)"}, ("v4 = self.m3(x)",), ("v4",)),
        Layout(Plan(stream={"tiles": [2, 3], "keep": "file"})),
    ),
    # A tile doubled, and torch's kernel copied pixels twice where the whole is resampled.
    (
        Program(
            (1, 2, 4),
            {"m1": "nn.PReLU(1)"},
            ("v3 = self.m1(x)", "v5 = F.interpolate(v3, scale_factor=2.3, mode='nearest')"),
            ("v5",),
        ),
        Layout(Plan(space=[2])),
    ),
    # Pixels that had become channels lay in tiles where ranks were to have their share of channels.
    (
        Program(
            (1, 4, 8, 7),
            {
                "m0": "nn.Conv2d(4, 3, 2, 1, 3, (1, 1), 1, True, 'zeros')",
                "m2": "nn.MultiheadAttention(3, 1, batch_first=True)",
                "m3": "nn.LayerNorm([156, 3], 1e-2, True)",
                "m4": "nn.Conv1d(156, 156, (5,), 3, 3, 2, 12, False, 'zeros')",
            },
            (
                "v1 = self.m0(x)",
                "v2 = v1.flatten(2).transpose(1, 2)",
                "v3 = self.m2(v2, v2, v2, need_weights=False)[0]",
                "v4 = self.m3(v3)",
                "v5 = self.m4(v4)",
            ),
            ("v5",),
        ),
        Layout(Plan(space=[1, 2], channel=2)),
    ),
    # A tile read what another of its pixels' gradient was made of, where no pixel of the smaller image reads it.
    (
        Program(
            (1, 2, 5, 6),
            {"m0": "nn.Conv2d(2, 4, 1)"},
            ("v1 = self.m0(x)", "v3 = F.interpolate(v1, size=(2, 6), mode='bilinear', align_corners=False)"),
            ("v3",),
        ),
        Layout(Plan(space=[3, 1])),
    ),
    # Where a tile is empty, ranks did not agree whether a flat image is a view.
    (
        Program(
            (1, 2, 9, 8),
            {"m1": "nn.LayerNorm(2, 1e-2, True)"},
            ("v2 = self.m1(x.movedim(1, -1)).movedim(-1, 1)", "v3 = v2 + 0", "v3.flatten(1).abs_()"),
            ("v3",),
        ),
        Layout(Plan(space=[1, 3]), ((0, 9), (0, 5, 8, 8))),
    ),
    # The strides of an empty tile, of a dim of one pixel, passed for the whole's.
    (
        Program(
            (2, 2, 5, 10),
            {"p0": "nn.Parameter(torch.randn(3))", "p1": "nn.Parameter(torch.randn(3, 2, 1, 1))"},
            (
                "v1 = F.conv2d(x, self.p1, self.p0, (3, 3), 'valid', 1, 1)",
                "v3 = v1.unfold(-1, 2, 3).unfold(-3, 2, 1).sum((-1, -2))",
                "v4 = v3.permute((0, 2, 1, 3))",
                "v7 = F.interpolate(v4, size=(1, 1), mode='area')",
            ),
            ("v7",),
        ),
        Layout(Plan(space=[2, 2])),
    ),
    # Where a thin piece was joined on, each rank's tile lay in memory as the piece did; a roll by nothing comes row-major.
    *(
        (
            Program(
                (1, 2, 8, 10),
                {"m1": "nn.LayerNorm(2, 1e-2, True)"},
                ("v2 = self.m1(x.movedim(1, -1)).movedim(-1, 1)", f"v3 = v2.roll({by}, 3)", "v4 = F.dropout(v3, 0.3)"),
                ("v4",),
            ),
            Layout(Plan(space=[1, 2])),
        )
        for by in (1, 10)
    ),
    # Images with channels last in tiles of one pixel: what was made of them lay in memory by chance, another on each rank, and
    # convolutions were asked how they lie on a device that has no kernels.
    *(
        (
            Program(
                shape,
                {
                    "m0": "nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.3), nn.Conv2d(4, 4, 1))",
                    "p0": "nn.Parameter(torch.randn(7, 2))",
                },
                (first, "v3 = self.m0(v1 * 0.1) * 0.1" if "p0" not in first else "v3 = v1 * 1"),
                ("v3",),
                Habit(channels_last=True),
            ),
            Layout(plan, cuts),
        )
        for shape, first, plan, cuts in (
            ((1, 4, 5, 5), "v1 = x * 0.1", Plan(space=[3, 1]), None),
            (
                (1, 4, 5, 6),
                "v1 = F.pad(x, [0, 1, 1, 0], mode='replicate') @ self.p0",
                Plan(space=[1, 3]),
                ((0, 5), (0, 3, 3, 6)),
            ),
            ((1, 4, 7, 9), "v1 = F.pad(x, [0, 2, 1, 2], mode='reflect')", Plan(space=[2, 2]), ((0, 3, 7), (0, 0, 9))),
            ((2, 4, 7, 9), "v1 = torch.empty_like(x).fill_(0.2)", Plan(replicate=2, channel=2), None),
        )
    ),
    # Sums of a bin's parts were divided before they were added up: bins that are equal on one device were not.
    (
        Program(
            (1, 1, 5, 3, 5),
            {
                "m0": "nn.Sequential(nn.Conv3d(1, 1, 3, padding=1), nn.ReLU(inplace=True), nn.BatchNorm3d(1), nn.Identity())",
            },
            (
                "a = self.m0(x)",
                "b = F.interpolate(a, size=(5, 6, 2), mode='area')",
                "c = b.argmax(4, keepdim=True).double() * 0.1 + b",
            ),
            ("c",),
        ),
        Layout(Plan(space=[1, 1, 2])),
    ),
    # Of one sample with channels last group norm gave strides by which torch's grouped convolutions have wrong gradients.
    (
        Program(
            (1, 4, 5, 9),
            {
                "m0": "nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.LeakyReLU(0.1, inplace=True), nn.GroupNorm(1, 4))",
                "p1": "nn.Parameter(torch.randn(2, 2, 2, 2))",
            },
            ("v1 = self.m0(x)", "v2 = F.conv2d(v1, self.p1, None, 1, (3, 3), (1, 1), 2)"),
            ("v2",),
            Habit(channels_last=True),
        ),
        Layout(Plan(space=[1, 2])),
    ),
    # Of tiles none of which tells an order, one was taken to tell it, and chance was drawn in that one.
    (
        Program(
            (1, 4, 5, 2, 3),
            {"m0": "nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.LeakyReLU(0.1, inplace=True), nn.Conv3d(4, 4, 1))"},
            (
                "v1 = self.m0(x)",
                "v2 = v1[:, ::2, 2::2, -1, 1::2]",
                "v3 = F.one_hot(v2.detach().argmax(1), v2.shape[1]).movedim(-1, 1).double() * v2",
                "v4 = v3 * (torch.rand_like(v3) < 0.7)",
            ),
            ("v4",),
        ),
        Layout(Plan(space=[2, 1, 2])),
    ),
    # Torch lays out pools of images with channels last like these, and some other things row-major, which rules did not.
    (
        Program(
            (2, 3, 12, 10),
            {"m0": "nn.Conv2d(3, 4, 3, padding=1)"},
            (
                "v1 = F.adaptive_avg_pool2d(self.m0(x), 3)",
                "v2 = F.dropout(v1, 0.5) + F.dropout(torch.stack([x, x], 2)[:, :, 0], 0.5).mean()",
                "v3 = F.dropout(F.pad(self.m0(x), [1, 1, 1, 1], mode='replicate'), 0.5).mean() + v2",
            ),
            ("v3",),
            Habit(channels_last=True),
        ),
        Layout(Plan(space=[2, 1])),
    ),
    # Circular padding by nothing kept channels last, and torch's makes it row-major.
    (
        Program(
            (1, 4, 6, 3),
            {"m0": "nn.Conv2d(4, 4, (2, 3), 1, 'valid', 1, 4, True, 'circular')"},
            ("v1 = self.m0(x)", "v2 = F.alpha_dropout(v1, 0.2, self.training)"),
            ("v2",),
            Habit(channels_last=True),
        ),
        Layout(Plan(space=[1, 2])),
    ),
    # A gradient that is no number went, with a weight of zero, to pixels that do not read it.
    (
        Program(
            (1, 4, 8, 9),
            {"m0": "nn.Conv2d(4, 2, (8, 3), padding=(0, 1))", "m3": "nn.Conv1d(2, 2, 3, padding=1)"},
            (
                "v1 = self.m0(x).squeeze(2)",
                "v5 = F.relu(self.m3(v1))",
                "v6 = F.interpolate(v5, scale_factor=0.5, mode='nearest')",
                "v7 = torch.sinc(v6)",
            ),
            ("v7",),
            Habit(penalty=True),
        ),
        Layout(Plan(space=[1, 2])),
    ),
    # What an operation makes that also writes to what it is given lay as its image, and torch's is row-major.
    (
        Program(
            (1, 3, 8, 7),
            {"m2": "nn.Sequential(nn.Conv2d(7, 7, 3, padding=1), nn.Dropout(0.3))"},
            ("v3 = torch.permute(x, (0, 3, 1, 2))", "v4 = F.rrelu(v3, training=False)", "v5 = self.m2(v4)"),
            ("v5",),
        ),
        Layout(Plan(space=[1, 2])),
    ),
    # Samples that lie in a weight as channels cut it on some ranks alone, and those refused its backward.
    (
        Program(
            (3, 1, 11, 5),
            {"m0": "nn.Conv2d(1, 1, (2, 3), (2, 1), 'valid')", "m1": "nn.Linear(3, 2)"},
            (
                "v2 = self.m1(self.m0(x))",
                "v3 = F.conv2d(v2.reshape(1, -1, *v2.shape[2:]), v2.flatten(2).mean(2).reshape(-1, 1, 1, 1), "
                "groups=v2.shape[0] * v2.shape[1])",
                "v5 = v3.reshape(v2.shape)",
            ),
            ("v5",),
        ),
        Layout(Plan(replicate=2, space=[2, 1])),
    ),
]
