"""Does each optimizer step as torch's or timm's own does, at the rate the batch asks for?"""

import re
import sys

import pytest
import timm.optim
import torch
from torch import nn

from widefield.config import OptimizerConfig
from widefield.training.optimizer import build_optimizer, learning_rate


class Net(nn.Module):
    """A matrix, a bias, a normalization, and a weight that does not train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 3), nn.LayerNorm(3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return self.norm(self.linear(x)) * self.frozen


def stepped(make, steps: int = 4) -> torch.Tensor:
    """All weights of a fresh Net after some steps in float64."""
    net = Net().double()
    optimizer = make(net)
    for number in range(steps):
        optimizer.zero_grad()
        x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        net(x).square().mul(torch.arange(3)).sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def ours(name: str, lr: float = 0.05, **options):
    return lambda net: build_optimizer(OptimizerConfig(name=name, **options), net, lr)


def theirs(kind, *, decay: float = 0.0, **options):
    """The library's own over all trained parameters, with weight decay on the matrix alone."""
    groups = lambda net: [  # noqa: E731
        {"params": [net.linear.weight], "weight_decay": decay},
        {"params": [net.linear.bias, net.norm.weight, net.norm.bias], "weight_decay": 0.0},
    ]
    return lambda net: kind(groups(net), lr=0.05, **options)


STEPS = {
    "sgd": (ours("sgd", weight_decay=0.1), theirs(torch.optim.SGD, decay=0.1, momentum=0.9)),
    "sgd with nesterov": (
        ours("sgd", momentum=0.8, nesterov=True),
        theirs(torch.optim.SGD, momentum=0.8, nesterov=True),
    ),
    "sgd with options": (ours("sgd", options={"dampening": 0.1}), theirs(torch.optim.SGD, momentum=0.9, dampening=0.1)),
    "adamw": (ours("adamw", weight_decay=0.1), theirs(torch.optim.AdamW, decay=0.1)),
    "adamw with betas": (
        ours("adamw", betas=[0.8, 0.9], options={"eps": 1e-3}),
        theirs(torch.optim.AdamW, decay=0.0, betas=(0.8, 0.9), eps=1e-3),
    ),
    "lars": (ours("lars", weight_decay=0.1), theirs(timm.optim.Lars, decay=0.1, momentum=0.9)),
    "lars with options": (
        ours("lars", nesterov=True, options={"trust_coeff": 0.01}),
        theirs(timm.optim.Lars, momentum=0.9, nesterov=True, trust_coeff=0.01),
    ),
    "lamb": (ours("lamb", weight_decay=0.1), theirs(timm.optim.Lamb, decay=0.1)),
    "lamb with betas": (
        ours("lamb", betas=[0.8, 0.9], options={"max_grad_norm": 0.5}),
        theirs(timm.optim.Lamb, betas=(0.8, 0.9), max_grad_norm=0.5),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_an_optimizer_steps_as_its_librarys_own(name):
    own, wanted = STEPS[name]
    torch.testing.assert_close(stepped(own), stepped(wanted), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb"])
def test_settings_do_change_the_steps(name):
    """Else the comparison above would hold for settings that go nowhere."""
    plain = stepped(ours(name))
    changed = [{"weight_decay": 0.5}, {"betas": [0.5, 0.6]} if name in ("adamw", "lamb") else {"momentum": 0.3}]
    assert all(not torch.equal(plain, stepped(ours(name, **change))) for change in changed)


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_torchs_optimizers_are_fused(name, kind):
    optimizer = ours(name)(Net())
    assert isinstance(optimizer, kind) and all(group["fused"] for group in optimizer.param_groups)


def test_weight_decay_spares_biases_and_normalization():
    net = Net()
    decayed, spared = ours("sgd", weight_decay=0.1)(net).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert [id(p) for p in decayed["params"]] == [id(net.linear.weight)]
    assert {id(p) for p in spared["params"]} == {id(p) for p in (net.linear.bias, net.norm.weight, net.norm.bias)}


def test_weight_decay_reaches_everything_that_trains_where_asked():
    net = Net()
    (group,) = ours("sgd", weight_decay=0.1, decay_norm_and_bias=True)(net).param_groups
    assert group["weight_decay"] == 0.1 and len(group["params"]) == 4
    assert not any(p is net.frozen for p in group["params"])


# ---------------------------------------------------------------------------------------------- the learning rate


@pytest.mark.parametrize(
    ("options", "batch", "lr", "told"),
    [
        ({"name": "sgd"}, 512, 0.2, "optimizer.lr=0.2: 0.1 at batch 256 by the linear rule, for batch 512"),
        ({"name": "adamw"}, 1024, 2e-3, "optimizer.lr=0.002: 0.001 at batch 256 by the sqrt rule, for batch 1024"),
        ({"name": "lars"}, 256, 0.5, "optimizer.lr=0.5: 0.5 at batch 256 by the linear rule, for batch 256"),
        ({"name": "lamb"}, 64, 8.75e-4, "optimizer.lr=0.000875: 0.00175 at batch 256 by the sqrt rule, for batch 64"),
        (
            {"name": "sgd", "lr_rule": "sqrt", "base_lr": 0.4, "base_batch_size": 128},
            32,
            0.2,
            "optimizer.lr=0.2: 0.4 at batch 128 by the sqrt rule, for batch 32",
        ),
    ],
)
def test_the_rule_for_the_learning_rate_is_a_sentence(options, batch, lr, told):
    found, sentence = learning_rate(OptimizerConfig(**options), batch)
    assert found == pytest.approx(lr, rel=1e-12) and sentence == told


def test_a_learning_rate_that_was_given_is_taken_without_a_word():
    assert learning_rate(OptimizerConfig(lr=0.3, lr_rule="sqrt"), 999) == (0.3, None)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("call", [lambda config: learning_rate(config, 8), lambda config: build_optimizer(config, Net(), 0.1)])
def test_an_optimizer_that_does_not_exist_is_refused(call):
    with pytest.raises(
        ValueError, match="there is no optimizer 'adam'; did you mean 'adamw'. It can be: sgd, adamw, lars, lamb"
    ):
        call(OptimizerConfig(name="adam"))


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb"])
def test_options_that_an_optimizer_does_not_take_are_refused(name):
    told = re.escape(f"optimizer.options {{'bets': 3}} do not fit '{name}': ")
    with pytest.raises(ValueError, match=told):
        ours(name, options={"bets": 3})(Net())


def test_nesterov_without_momentum_is_refused():
    with pytest.raises(ValueError, match="Nesterov momentum requires a momentum"):
        ours("sgd", momentum=0.0, nesterov=True)(Net())


def test_a_model_without_anything_to_train_is_refused():
    with pytest.raises(ValueError, match="the model has no parameter that takes gradients, so there is nothing to train"):
        ours("sgd")(Net().requires_grad_(False))


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_timm_that_is_not_installed_says_how_to_install_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    told = re.escape(f"optimizer.name={name} comes from timm, which is not installed; pip install 'widefield[timm]'")
    with pytest.raises(ValueError, match=told):
        ours(name)(Net())
