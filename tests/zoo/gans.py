"""Generators and discriminators as their papers draw them: DCGAN (arXiv:1511.06434) and pix2pixHD (arXiv:1711.11585)."""

from __future__ import annotations

from torch import Tensor, nn


def dcgan_generator(width: int = 8) -> nn.Module:
    """From (B, 100, 1, 1) noise to 64 x 64 images."""
    layers: list[nn.Module] = []
    channels = [100, 8 * width, 4 * width, 2 * width, width]
    for level, (a, b) in enumerate(zip(channels, channels[1:], strict=False)):
        stride, padding = (1, 0) if level == 0 else (2, 1)
        layers += [nn.ConvTranspose2d(a, b, 4, stride, padding, bias=False), nn.BatchNorm2d(b), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


def dcgan_discriminator(width: int = 8) -> nn.Module:
    """From 64 x 64 images to one number each."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for level in range(3):
        a = width * 2**level
        layers += [nn.Conv2d(a, 2 * a, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * a), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False), nn.Sigmoid())


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        half = [nn.ReflectionPad2d(1), nn.Conv2d(channels, channels, 3), nn.InstanceNorm2d(channels)]
        again = [nn.ReflectionPad2d(1), nn.Conv2d(channels, channels, 3), nn.InstanceNorm2d(channels)]
        self.body = nn.Sequential(*half, nn.ReLU(True), *again)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def pix2pixhd_generator(width: int = 8, blocks: int = 2) -> nn.Module:
    """The global generator: 7x7, three strides down, residual blocks, three transposed up, 7x7; reflection padding."""
    layers: list[nn.Module] = [nn.ReflectionPad2d(3), nn.Conv2d(3, width, 7), nn.InstanceNorm2d(width), nn.ReLU(True)]
    for level in range(3):
        a = width * 2**level
        layers += [nn.Conv2d(a, 2 * a, 3, 2, 1), nn.InstanceNorm2d(2 * a), nn.ReLU(True)]
    layers += [_Residual(8 * width) for _ in range(blocks)]
    for level in reversed(range(3)):
        a = width * 2**level
        layers += [nn.ConvTranspose2d(2 * a, a, 3, 2, 1, output_padding=1), nn.InstanceNorm2d(a), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh())


class MultiscaleDiscriminator(nn.Module):
    """Patch discriminators on the image and on it halved; all features come back, for the feature-matching loss."""

    def __init__(self, width: int = 8, scales: int = 2) -> None:
        super().__init__()
        self.nets = nn.ModuleList(self._patch(width) for _ in range(scales))
        self.down = nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False)

    @staticmethod
    def _patch(width: int) -> nn.ModuleList:
        steps = [nn.Sequential(nn.Conv2d(3, width, 4, 2, 2), nn.LeakyReLU(0.2, True))]
        for a, stride in ((width, 2), (2 * width, 2), (4 * width, 1)):
            steps.append(nn.Sequential(nn.Conv2d(a, 2 * a, 4, stride, 2), nn.InstanceNorm2d(2 * a), nn.LeakyReLU(0.2, True)))
        steps.append(nn.Sequential(nn.Conv2d(8 * width, 1, 4, 1, 2)))
        return nn.ModuleList(steps)

    def forward(self, image: Tensor) -> list[list[Tensor]]:
        answers = []
        for net in self.nets:
            features, x = [], image
            for step in net:
                x = step(x)
                features.append(x)
            answers.append(features)
            image = self.down(image)
        return answers
