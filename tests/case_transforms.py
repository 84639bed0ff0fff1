"""Transforms of a user's own, for tests/data/test_pixel_transforms.py."""

import torch


def darker(image, labels, by=2):
    return image // by, labels


darker.pointwise = True


def shade(image, by=2):
    return image // by


class Darker:
    pointwise = True

    def __init__(self, by):
        self.by = by

    def __call__(self, image, labels):
        return image // self.by, labels


def upper_half(image, labels):
    return image[:, : image.shape[1] // 2], labels[..., : labels.shape[-2] // 2, :]


def none(image, labels):
    return None


def floats(image, labels):
    return image.float(), labels


def image_alone(image, labels):
    return image[:, 1:], torch.as_tensor(labels)


def left_half(image):
    return image[..., : image.shape[2] // 2]


def first_planes(image, labels):
    return image[:, :6], labels[..., :6, :, :]
