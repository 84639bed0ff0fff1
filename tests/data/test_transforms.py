"""Does a recipe's list of transforms do what torchvision does, with randomness that is each sample's own?"""

import doctest
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import v2

from widefield.data import transforms
from widefield.data.transforms import Transforms, seed_of, seeded

CPU = torch.device("cpu")
IMAGE = torch.randint(0, 256, (3, 12, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
RANDOM = ["RandomHorizontalFlip", {"RandomCrop": {"size": 8, "padding": 2}}, {"ColorJitter": {"brightness": 0.5}}]
part = st.one_of(st.integers(0, 2**63), st.text(max_size=4))


def made(*listed) -> Transforms:
    return Transforms(listed, field="data.read")


def test_the_examples_in_the_docstrings_hold():
    result = doctest.testmod(transforms)
    assert result.failed == 0 and result.attempted == 1


def test_no_transforms_leave_an_image_as_it_is():
    assert made()(IMAGE, 3) is IMAGE


def test_a_list_runs_in_order_as_torchvision_runs_it():
    listed = [{"Resize": {"size": [9, 7], "interpolation": "bicubic"}}, {"CenterCrop": {"size": 6}}, "RandomHorizontalFlip"]
    image = made(*listed)(IMAGE, 5)
    torch.manual_seed(5)
    wanted = v2.Resize([9, 7], interpolation=v2.InterpolationMode.BICUBIC)(IMAGE)
    wanted = v2.RandomHorizontalFlip()(v2.CenterCrop(6)(wanted))
    assert torch.equal(image, wanted) and image.dtype == torch.uint8


def test_null_arguments_are_none():
    assert torch.equal(made({"Grayscale": None})(IMAGE, 0), v2.Grayscale()(IMAGE))


@given(seed=st.integers(0, 2**63 - 1))
def test_the_seed_alone_decides_what_an_image_becomes(seed):
    transform = made(*RANDOM)
    torch.manual_seed(1)
    first = transform(IMAGE, seed)
    torch.rand(7)
    assert torch.equal(first, transform(IMAGE, seed))


def test_other_seeds_give_other_images():
    images = {made(*RANDOM)(IMAGE, seed).numpy().tobytes() for seed in range(50)}
    assert len(images) == 50


def test_the_random_numbers_of_the_program_go_on_as_if_nothing_had_been_transformed():
    torch.manual_seed(3)
    undisturbed = torch.rand(4)
    torch.manual_seed(3)
    made(*RANDOM)(IMAGE, 11)
    assert torch.equal(torch.rand(4), undisturbed)
    torch.manual_seed(3)
    with pytest.raises(KeyError), seeded(11, CPU):
        torch.rand(1)
        raise KeyError
    assert torch.equal(torch.rand(4), undisturbed)


@given(one=st.lists(part, max_size=4), other=st.lists(part, max_size=4))
def test_a_seed_is_a_function_of_its_parts_that_torch_takes(one, other):
    assert 0 <= seed_of(*one) < 2**63
    torch.Generator().manual_seed(seed_of(*one))
    assert (seed_of(*one) == seed_of(*other)) == (one == other)


def test_seeds_never_change_from_release_to_release():
    """A run that is resumed with a newer version must go on with the same order of images."""
    assert seed_of(0, "order", 0) == 2094333682667709378
    assert seed_of(7, "augment", 3, 17) == 7696606219436988230


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("RandomCorp", "data.read[1]: torchvision.transforms.v2 has no 'RandomCorp'; did you mean 'RandomCrop'?"),
        ({"Lambda": {"lambd": "os.system"}}, "data.read[1]: Lambda takes functions or other transforms, which a recipe cannot"),
        ("functional", "data.read[1]: torchvision.transforms.v2 has no 'functional'."),
        ({"RandomCrop": {"sise": 3}}, "data.read[1]: RandomCrop does not take {'sise': 3}: "),
        ({"RandomCrop": {}}, "data.read[1]: RandomCrop does not take {}: "),
        (
            {"Resize": {"size": 3, "interpolation": "cubist"}},
            "data.read[1]: Resize does not take {'size': 3, 'interpolation': ",
        ),
        ({"RandomHorizontalFlip": {"p": 7}}, "data.read[1]: RandomHorizontalFlip does not take {'p': 7}: "),
        ({"CenterCrop": 24}, "data.read[1]: CenterCrop is given 24; name its arguments: CenterCrop: {size: 32}"),
        ({"Resize": [8, 8]}, "data.read[1]: Resize is given [8, 8]; name its arguments"),
        ({"Resize": {"size": 3}, "CenterCrop": {"size": 3}}, "; write a name, or one name with its arguments: RandomCrop: "),
        ({}, "data.read[1] is {}; write a name, or one name with its arguments: RandomCrop: {size: 32}"),
        (["Resize"], "data.read[1] is ['Resize']; write a name, or one name"),
        (7, "data.read[1] is 7; write a name, or one name"),
    ],
)
def test_a_transform_that_cannot_be_is_refused_with_its_place_in_the_recipe(entry, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        made("RandomHorizontalFlip", entry)
