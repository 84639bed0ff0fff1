"""Does everything a resumed run needs come back bit for bit?"""

import random

import numpy as np
import pytest
import torch
from torch import nn

from widefield.config import OptimizerConfig
from widefield.training.optimizer import build_optimizer
from widefield.training.state import (
    load_optimizer_state,
    load_random_state,
    optimizer_state,
    random_state,
    seed_everything,
    shapes_of,
)

OPTIMIZERS = {
    "sgd": {"momentum": 0.9},
    "sgd without momentum": {"momentum": 0.0},
    "adamw": {},
    "adamw with amsgrad": {"options": {"amsgrad": True}},
    "lars": {},
    "lamb": {},
}


def net(memory_format: torch.memory_format = torch.contiguous_format) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4, 5))
    return model.to(memory_format=memory_format)


def optimizer_of(name: str, model: nn.Module, **options) -> torch.optim.Optimizer:
    options = {"name": name.split()[0], "weight_decay": 0.01} | OPTIMIZERS[name] | options
    return build_optimizer(OptimizerConfig(**options), model, 0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        x = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        optimizer.step()


def packed(value):
    """As a checkpoint hands it over: fresh dicts, lists and tensors, all keys text."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value), list(value)
        return {key: packed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [packed(item) for item in value]
    assert value is None or isinstance(value, (bool, int, float, str)), type(value)
    return value


def bits(model: nn.Module) -> bytes:
    return b"".join(value.detach().contiguous().numpy().tobytes() for value in model.state_dict().values())


# ---------------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_from_a_saved_state_bit_for_bit(name, memory_format):
    whole = net(memory_format)
    train(whole, optimizer := optimizer_of(name, whole), range(3))
    weights, state = packed(dict(whole.state_dict())), packed(optimizer_state(whole, optimizer))
    train(whole, optimizer, range(3, 7))

    resumed = net(memory_format)
    resumed.load_state_dict(weights)
    load_optimizer_state(resumed, again := optimizer_of(name, resumed), state)
    train(resumed, again, range(3, 7))
    assert bits(resumed) == bits(whole)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw with amsgrad", "lars", "lamb"])
def test_without_the_state_training_goes_on_differently(name):
    """Else the test above would hold for a state that is lost."""
    whole = net()
    train(whole, optimizer := optimizer_of(name, whole), range(3))
    weights = packed(dict(whole.state_dict()))
    train(whole, optimizer, range(3, 7))
    fresh = net()
    fresh.load_state_dict(weights)
    train(fresh, optimizer_of(name, fresh), range(3, 7))
    assert bits(fresh) != bits(whole)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_that_was_loaded_is_the_state_that_was_saved(name):
    model = net()
    train(model, optimizer := optimizer_of(name, model), range(3))
    state = packed(optimizer_state(model, optimizer))
    load_optimizer_state(model, again := optimizer_of(name, model), state)
    loaded = packed(optimizer_state(model, again))
    assert loaded.pop("kind") == state.pop("kind") == type(optimizer).__name__
    torch.testing.assert_close(loaded, state, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars"])
def test_a_state_fits_whatever_the_groups_of_parameters(name):
    whole = net()
    train(whole, optimizer := optimizer_of(name, whole, weight_decay=0.0), range(3))
    weights, state = packed(dict(whole.state_dict())), packed(optimizer_state(whole, optimizer))
    train(whole, optimizer, range(3, 5))
    resumed = net()
    resumed.load_state_dict(weights)
    one_group = optimizer_of(name, resumed, weight_decay=0.0, decay_norm_and_bias=True)
    load_optimizer_state(resumed, one_group, state)
    assert len(one_group.param_groups) == 1 and len(optimizer.param_groups) == 2
    train(resumed, one_group, range(3, 5))
    assert bits(resumed) == bits(whole)


def test_hyperparameters_are_the_configs_and_not_the_checkpoints():
    model = net()
    train(model, optimizer := optimizer_of("adamw", model), range(2))
    state = packed(optimizer_state(model, optimizer))
    again = optimizer_of("adamw", model, betas=[0.5, 0.6], weight_decay=0.3)
    load_optimizer_state(model, again, state)
    assert again.param_groups[0]["betas"] == (0.5, 0.6) and again.param_groups[0]["weight_decay"] == 0.3


def test_a_state_that_lacks_a_part_is_refused():
    model = net()
    with pytest.raises(ValueError, match=r"state of the optimizer has no 'kind'; take the checkpoint from where it was"):
        load_optimizer_state(model, optimizer_of("adamw", model), {"parameters": {}, "groups": {}})


def test_lambs_step_counter_comes_back_for_every_number_of_groups():
    """timm keeps it in the groups; a group without it would begin bias correction anew."""
    model = net()
    train(model, optimizer := optimizer_of("lamb", model), range(3))
    state = packed(optimizer_state(model, optimizer))
    one = optimizer_of("lamb", model, decay_norm_and_bias=True)
    load_optimizer_state(model, one, state)
    assert [group["step"] for group in one.param_groups] == [3]
    two = optimizer_of("lamb", model)
    load_optimizer_state(model, two, packed(optimizer_state(model, one)))
    train(model, two, range(1))
    assert [group["step"] for group in two.param_groups] == [4, 4], "each counts for itself"


def test_momenta_lie_in_memory_as_their_weights_do():
    model = net(torch.channels_last)
    train(model, optimizer := optimizer_of("sgd", model), range(2))
    state = packed(optimizer_state(model, optimizer))
    state["parameters"]["0.weight"]["momentum_buffer"] = state["parameters"]["0.weight"]["momentum_buffer"].contiguous()
    load_optimizer_state(model, again := optimizer_of("sgd", model), state)
    weight = model[0].weight
    assert again.state[weight]["momentum_buffer"].stride() == weight.stride()


def test_a_state_of_other_parameters_is_refused():
    model = net()
    train(model, optimizer := optimizer_of("sgd", model), range(1))
    other = nn.Sequential(model[0])
    with pytest.raises(ValueError, match=r"the checkpoint's optimizer trains 1\.bias \(and 3 more\), unknown to this model"):
        load_optimizer_state(other, optimizer_of("sgd", other), packed(optimizer_state(model, optimizer)))


@pytest.mark.parametrize(("saved", "now"), [("sgd", "adamw"), ("adamw", "sgd"), ("adamw", "lamb"), ("lamb", "adamw")])
def test_a_state_of_another_optimizer_is_refused(saved, now):
    """It would fail amid the first step at best, and train without its momenta at worst."""
    model = net()
    train(model, optimizer := optimizer_of(saved, model), range(1))
    with pytest.raises(ValueError, match="of another optimizer.*; set optimizer.name back"):
        load_optimizer_state(model, optimizer_of(now, model), packed(optimizer_state(model, optimizer)))


# ---------------------------------------------------------------------------------------------- random numbers


def draws() -> list:
    words = [random.random(), random.gauss(0, 1), *np.random.rand(3), np.random.randn()]
    return [*words, *torch.rand(3).tolist(), torch.randn(1).item()]


@pytest.mark.parametrize("drawn", range(4))
def test_random_numbers_go_on_where_they_stood(drawn):
    """An odd number of normal draws leaves one in Python's and NumPy's pocket, which belongs to the state."""
    seed_everything(7)
    for _ in range(drawn):
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    state = packed(random_state())
    after = draws()
    seed_everything(8)
    load_random_state(state)
    assert draws() == after


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**63 - 1])
def test_a_seed_decides_all_three(seed):
    seed_everything(seed)
    first = draws()
    seed_everything(seed)
    assert draws() == first
    seed_everything(seed ^ 1)
    assert not set(first) & set(draws())


def test_the_shapes_of_a_model_are_those_of_its_state():
    shapes = shapes_of(net())
    assert shapes["0.weight"] == [4, 3, 3, 3] and shapes["1.num_batches_tracked"] == [] and len(shapes) == 9
