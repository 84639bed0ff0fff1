"""Does SyncBatchNorm over ranks give what BatchNorm gives on the whole batch?  Float64 to 1e-12 unless said otherwise."""

from __future__ import annotations

import copy
import io
from collections import Counter
from functools import partial

import devices
import pytest
import torch
import torch.distributed as dist
from devices import on_gpu_too
from ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from widefield.geometry.interval import parts_of
from widefield.parallel.inactive import inactive
from widefield.plans import Plan
from widefield.tiled.api import tile, whole
from widefield.tiled.sync_batch_norm import SyncBatchNorm, average_running_statistics, broadcast_buffers

close = devices.close  # 1e-12 on the CPU: sums of at most 1e3 float64 numbers of order 1
KIND = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
SHAPES = [(7, 3), (7, 3, 5), (7, 3, 4, 5), (7, 3, 2, 4, 3)]


def batches(shape, dtype=torch.float64, *, steps=2, mean=1.5, std=2.0):
    """Inputs and the gradients of outputs, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    draw = partial(torch.randn, shape, generator=generator, dtype=torch.float64)
    return [((draw() * std + mean).to(dtype), draw().to(dtype)) for _ in range(steps)]


def layer_of(shape, **options):
    layer = KIND[len(shape)](shape[1], **options)
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 2.0, shape[1]))
            layer.bias.copy_(torch.linspace(-1.0, 1.0, shape[1]))
    return layer


def layer_over(*args, **kwargs):
    """A layer of ours on the device of the test."""
    return SyncBatchNorm(*args, **kwargs).to(devices.here())


def trained(layer, pairs, run=lambda layer, x: layer(x)):
    """Output, input gradient of each batch, then parameter gradients and buffers after all."""
    found = []
    for x, gradient in pairs:
        x = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = run(layer, x)
        y.backward(gradient)
        found += [y.detach(), x.grad]
    return found, {name: p.grad for name, p in layer.named_parameters()}, dict(layer.named_buffers())


def compare_with_the_whole(mesh, shape, cut, options, assert_equal=close, dtype=torch.float64, run=None, memory_format=None):
    """Train on my share; outputs and gradients are the whole's rows, parameter gradients add up to the whole's."""
    pairs = batches(shape, dtype)
    if memory_format is not None:
        pairs = [(x.contiguous(memory_format=memory_format), g) for x, g in pairs]
    mine = parts_of(cut)[mesh.rank]
    ours = SyncBatchNorm.convert(layer_of(shape, **options).to(dtype), mesh.data_group)
    assert type(ours) is SyncBatchNorm
    run = {} if run is None else {"run": run}
    whole, weights, buffers = trained(layer_of(shape, **options).to(dtype), pairs)
    parts, my_weights, my_buffers = trained(
        ours, [(x[mine.start : mine.stop], g[mine.start : mine.stop]) for x, g in pairs], **run
    )
    for part, all_rows in zip(parts, whole, strict=True):
        assert_equal(part, all_rows[mine.start : mine.stop])
    for name, gradient in weights.items():
        assert_equal(mesh.sum_(my_weights[name].clone()), gradient)
    for name, buffer in buffers.items():
        assert_equal(my_buffers[name], buffer)
    assert my_buffers.keys() == buffers.keys()


@on_gpu_too
@pytest.mark.parametrize("cut", [(0, 3, 7), (0, 6, 7), (0, 0, 7)], ids=["3+4", "6+1", "0+7"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)}d")
def test_two_ranks_equal_the_whole_batch(shape, cut):
    on_ranks(2, compare_with_the_whole, shape, cut, {})


@on_gpu_too
@pytest.mark.parametrize("cut", [(0, 3, 5, 7), (0, 5, 5, 7), (0, 0, 7, 7)], ids=["3+2+2", "5+0+2", "0+7+0"])
def test_three_ranks_equal_the_whole_batch(cut):
    on_ranks(3, compare_with_the_whole, (7, 3, 4, 5), cut, {})


@on_gpu_too
@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.7, "eps": 1e-2}],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()),
)
def test_every_option_of_batch_norm_is_kept(options):
    on_ranks(2, compare_with_the_whole, (7, 3, 4, 5), (0, 3, 7), options)


def channels_last_stays(mesh):
    compare_with_the_whole(mesh, (7, 3, 4, 5), (0, 3, 7), {}, memory_format=torch.channels_last)
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = layer_over(3, group=mesh.data_group)(x)
    y.backward(torch.randn(2, 3, 4, 5))
    return y.stride() == x.stride(), x.grad.stride() == x.stride()


@on_gpu_too
def test_channels_last_stays_channels_last():
    assert on_ranks(2, channels_last_stays) == [(True, True)] * 2


def recompute(layer, x):
    """Recomputing moves the running statistics twice, as it does with BatchNorm on one device; so they are put back."""
    kept = copy.deepcopy(dict(layer.named_buffers()))
    y = checkpoint(layer, x, use_reentrant=False)

    def put_back(gradient):
        with torch.no_grad():
            for name, buffer in layer.named_buffers():
                buffer.copy_(kept[name])
        return gradient

    y.register_hook(put_back)
    return y


def compiled_by(backend, layer, x):
    return torch.compile(layer, backend=backend)(x)


@on_gpu_too
def test_recomputing_activations_changes_nothing():
    on_ranks(2, compare_with_the_whole, (7, 3, 4, 5), (0, 3, 7), {}, close, torch.float64, recompute)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiling_changes_nothing(backend):
    run = partial(compiled_by, backend)
    on_ranks(2, compare_with_the_whole, (7, 3, 4, 5), (0, 3, 7), {}, close, torch.float64, run)


def from_broken_running_statistics(mesh):
    layer = layer_over(2, group=mesh.data_group, dtype=torch.float64)
    layer.running_mean.fill_(float("nan"))
    return layer(torch.arange(4.0, dtype=torch.float64).view(2, 2) + 4 * mesh.rank)


@on_gpu_too
def test_a_nan_in_the_running_mean_does_not_reach_the_output():
    whole = nn.BatchNorm1d(2).double()(torch.arange(8.0, dtype=torch.float64).view(4, 2)).detach()
    close(torch.cat([part.detach() for part in on_ranks(2, from_broken_running_statistics)]), whole)


# ---------------------------------------------------------------------------------------------- low precision


def errors(mesh, dtype, mean, std):
    """Largest errors against float64 on the whole batch: (ours, torch's on one device) for output, gradient, statistics."""
    shape = (16, 32, 6, 6)
    pairs = batches(shape, dtype, steps=1, mean=mean, std=std)
    exact, _, exact_buffers = trained(layer_of(shape).double(), [(x.double(), g.double()) for x, g in pairs])
    one, _, one_buffers = trained(layer_of(shape), pairs)
    cut = [0, 5, 16] if mesh.size == 2 else [0, 16]
    mine = slice(*cut[mesh.rank : mesh.rank + 2])
    layer = SyncBatchNorm.convert(layer_of(shape), mesh.data_group)
    parts, _, buffers = trained(layer, [(x[mine], g[mine]) for x, g in pairs])
    rows = [(mesh.gather_objects(part), alone, right) for part, alone, right in zip(parts, one, exact, strict=True)]
    found = [(torch.cat(ours), alone, right) for ours, alone, right in rows]
    found += [(buffers[name], one_buffers[name], exact_buffers[name]) for name in ("running_mean", "running_var")]
    return [((ours - right).abs().max().item(), (alone - right).abs().max().item()) for ours, alone, right in found]


@pytest.mark.parametrize(("dtype", "mean", "std"), [
    (torch.float32, 100.0, 0.01), (torch.float32, 0.0, 1.0), (torch.bfloat16, 10.0, 0.1), (torch.float16, 10.0, 0.1),
])  # fmt: skip
def test_far_from_zero_no_worse_than_twice_torch_on_one_device(dtype, mean, std):
    for ours, alone in on_ranks(2, errors, dtype, mean, std)[0]:
        assert ours <= 2 * alone + 1e-12


def autocast_dtypes(mesh):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    SyncBatchNorm.convert(net, mesh.data_group)
    with torch.autocast(mesh.device.type, torch.bfloat16):
        y = net(torch.randn(2, 3, 8, 8))
    y.float().square().sum().backward()
    return y.dtype, net[0].weight.grad.dtype, net[1].weight.grad.dtype, net[1].running_mean.dtype


@on_gpu_too
def test_autocast_keeps_statistics_and_gradients_in_float32():
    assert on_ranks(2, autocast_dtypes)[0] == (torch.bfloat16, torch.float32, torch.float32, torch.float32)


def half_model(mesh):
    layer = SyncBatchNorm.convert(nn.BatchNorm2d(3).to(torch.bfloat16), mesh.data_group)
    x = torch.randn(2, 3, 4, 4, dtype=torch.bfloat16, requires_grad=True)
    layer(x).square().sum().backward()
    return [x.grad.dtype, layer.weight.grad.dtype, layer.running_var.dtype]


@on_gpu_too
def test_a_model_wholly_in_bfloat16_runs():
    assert on_ranks(2, half_model)[0] == [torch.bfloat16] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gpus_kernels_give_what_the_cpus_operations_give(dtype, memory_format, tmp_path):
    """One rank through the path of many; values per channel 1e2, so errors are a few units in the last place."""
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        pairs = [(x.contiguous(memory_format=memory_format), g) for x, g in batches((7, 3, 4, 5), dtype)]
        layer = layer_of((7, 3, 4, 5)).to(torch.float64 if dtype == torch.float64 else torch.float32)
        whole, weights, buffers = trained(copy.deepcopy(layer), pairs)
        there = SyncBatchNorm.convert(layer, dist.group.WORLD).cuda()
        run = lambda layer, x: layer._over_ranks(x)  # noqa: E731
        found = trained(there, [(x.cuda(), g.cuda()) for x, g in pairs], run)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        same = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance, check_device=False)
        for ours, theirs in zip(found, (whole, weights, buffers), strict=True):
            same(ours, theirs)
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------- messages


def count_messages(mesh, input_needs_gradient):
    counts = Counter()
    send = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        counts[place, tensor.numel()] += 1
        return send(tensor, *args, **kwargs)

    layer = layer_over(5, group=mesh.data_group)
    dist.all_reduce = counted
    try:
        place = "forward"
        y = layer(torch.randn(3, 5, 2, 2, requires_grad=input_needs_gradient))
        place = "backward"
        y.square().sum().backward()
    finally:
        dist.all_reduce = send
    return dict(counts)


@on_gpu_too
def test_one_message_forward_and_one_backward():
    assert on_ranks(2, count_messages, True) == [{("forward", 13): 1, ("backward", 10): 1}] * 2


@on_gpu_too
def test_no_message_backward_where_the_input_needs_no_gradient():
    assert on_ranks(2, count_messages, False) == [{("forward", 13): 1}] * 2


def in_a_subgroup(mesh):
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    x = torch.arange(6.0, dtype=torch.float64).view(3, 2, 1)[mesh.rank : mesh.rank + 1] * torch.ones(
        1, 2, 3, dtype=torch.float64
    )
    layer = layer_over(2, group=groups[mesh.rank // 2], dtype=torch.float64)
    layer(x + torch.arange(3))
    return layer.running_mean


@on_gpu_too
def test_any_process_group_serves():
    first, second, alone = on_ranks(3, in_a_subgroup)
    close(first, torch.tensor([0.2, 0.3], dtype=torch.float64))  # means 2 and 3 of ranks 0 and 1, momentum 0.1
    close(second, first)
    close(alone, torch.tensor([0.5, 0.6], dtype=torch.float64))


# ---------------------------------------------------------------------------------------------- tiles


def compare_copies(mesh, shape, convert, prepare, ghosts=()):
    """Copies with 3 and 4 of 7 samples (or one with all), each cut over its ranks: together they are the whole batch.

    prepare(mesh, x) makes of a copy's samples what the layer gets.  Copies in `ghosts` have no sample and run a stand-in.
    """
    cut = (0, 7) if mesh.copies == 1 else (0, 7, 7) if ghosts else (0, 3, 7)
    pairs, mine = batches(shape), parts_of(cut)[mesh.copy]
    layer, right = (layer_of(prepare(None, pairs[0][0]).shape).double() for _ in range(2))
    if convert:
        SyncBatchNorm.convert(layer, mesh.statistics_group, alike=mesh.grid.size)
    for x, gradient in pairs:
        x_whole = x.clone().requires_grad_()
        y_whole = right(prepare(None, x_whole))
        gradient = gradient[(..., *[0] * (gradient.ndim - y_whole.ndim))]
        y_whole.backward(gradient)
        if mesh.copy in ghosts:
            step_of_a_ghost(mesh, layer, shape, prepare)
            continue
        x_mine = x[mine.start : mine.stop].clone().requires_grad_()
        y = layer(prepare(mesh, x_mine))
        whole(y).backward(gradient[mine.start : mine.stop])
        close(whole(y), y_whole[mine.start : mine.stop])
        close(x_mine.grad, x_whole.grad[mine.start : mine.stop])
    for name, parameter in right.named_parameters():  # DDP's mean, of losses that are each one copy's
        close(mesh.sum_(layer.get_parameter(name).grad.clone()) / mesh.size * mesh.copies, parameter.grad)
    close(dict(layer.named_buffers()), dict(right.named_buffers()))


def step_of_a_ghost(mesh, layer, shape, prepare):
    stand_in = torch.full((1, *shape[1:]), 1e6, dtype=torch.float64, requires_grad=True)
    with inactive(layer):
        whole(layer(prepare(mesh, stand_in))).sum().backward()
    assert stand_in.grad.count_nonzero() == 0


def cut_at(*bounds):
    return partial(_cut, bounds)


def _cut(bounds, mesh, x):
    return x if mesh is None else tile(x, mesh, [None if b is None else list(b) for b in bounds])


def pooled(mesh, x):
    """The same on every rank of a copy, and a tiled tensor all the same."""
    return (x if mesh is None else tile(x, mesh)).mean((2, 3))


def plain(mesh, x):
    return x


ROWS, UNEVEN, EMPTY = cut_at((0, 2, 5), None), cut_at((0, 1, 5), None), cut_at((0, 5, 5), None)


@on_gpu_too
@pytest.mark.parametrize("convert", [True, False], ids=["synchronized", "plain BatchNorm"])
@pytest.mark.parametrize("prepare", [ROWS, UNEVEN, EMPTY, pooled], ids=["2+3", "1+4", "5+0", "pooled"])
def test_tiles_of_one_image_equal_the_whole(prepare, convert):
    on_ranks(2, compare_copies, (7, 3, 5, 4), convert, prepare, plan=Plan(space=[2, 1]))


@on_gpu_too
@pytest.mark.parametrize("prepare", [ROWS, UNEVEN, EMPTY, pooled, plain], ids=["2+3", "1+4", "5+0", "pooled", "plain"])
def test_tiles_of_two_copies_equal_the_whole_batch(prepare):
    on_ranks(4, compare_copies, (7, 3, 5, 4), True, prepare, plan=Plan(replicate=2, space=[2, 1]))


@on_gpu_too
def test_cut_channels_are_brought_together():
    on_ranks(4, compare_copies, (7, 3), True, cut_at((0, 2, 3)), plan=Plan(replicate=2, space=[2]))


@on_gpu_too
def test_a_copy_of_ghosts_counts_nothing():
    on_ranks(4, compare_copies, (7, 3, 5, 4), True, ROWS, (1,), plan=Plan(replicate=2, space=[2, 1]))


def cut_in_one_of_two_axes(mesh, x):
    """With 2 x 2 ranks two of them hold each part."""
    return (x if mesh is None else tile(x, mesh)).mean(3)


@on_gpu_too
def test_parts_that_two_ranks_hold_count_once():
    on_ranks(4, compare_copies, (7, 3, 5, 4), True, cut_in_one_of_two_axes, plan=Plan(space=[2, 2]))


# ---------------------------------------------------------------------------------------------- ghosts


def ghost_is_no_one(mesh):
    """Rank 1 runs a stand-in: rank 0 gets what it gets alone; the ghost sees the same statistics and gives no gradient."""
    x, gradient = batches((4, 3, 2, 2), steps=1)[0]
    alone, weights, buffers = trained(layer_of((4, 3, 2, 2)).double(), [(x, gradient)])
    layer = SyncBatchNorm.convert(layer_of((4, 3, 2, 2)).double(), mesh.data_group)
    if mesh.rank == 0:
        found, my_weights, my_buffers = trained(layer, [(x, gradient)])
        close(found, alone)
        close(my_weights, weights)
    else:
        stand_in = torch.full((1, 3, 2, 2), 1e6, dtype=torch.float64, requires_grad=True)
        with inactive(layer):
            y = layer(stand_in)
        y.backward(torch.ones_like(y))  # after the context: backward remembers
        assert stand_in.grad.count_nonzero() == 0
        assert layer.weight.grad.count_nonzero() == layer.bias.grad.count_nonzero() == 0
        close(y[0, :, 0, 0], (1e6 - x.mean((0, 2, 3))) / (x.var((0, 2, 3), correction=0) + layer.eps).sqrt()
              * layer.weight + layer.bias)  # fmt: skip
        my_buffers = dict(layer.named_buffers())
    close(my_buffers, buffers)
    return hasattr(layer, "inactive")


@on_gpu_too
def test_a_ghost_counts_nothing_and_gives_no_gradient():
    assert on_ranks(2, ghost_is_no_one) == [False, False]


@pytest.mark.parametrize(
    "kind", [nn.BatchNorm2d, partial(nn.InstanceNorm2d, track_running_stats=True)], ids=["batch", "instance"]
)
def test_a_ghost_leaves_running_statistics_of_plain_layers_alone(kind):
    model = nn.Sequential(kind(3))
    before = copy.deepcopy(model.state_dict())
    with inactive(model):
        model(torch.randn(2, 3, 4, 4))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    model(torch.randn(2, 3, 4, 4))
    assert not torch.equal(model[0].running_mean, before["0.running_mean"])


def test_a_ghost_in_evaluation_still_normalizes_with_running_statistics():
    layer = nn.BatchNorm2d(3).eval()
    x = torch.randn(2, 3, 4, 4)
    with inactive(layer):
        torch.testing.assert_close(layer(x), x, rtol=1e-4, atol=1e-4)  # eps 1e-5 beside a variance of 1


# ---------------------------------------------------------------------------------------------- converting


class Named(nn.BatchNorm2d):
    """Specialises without a forward of its own."""

    def extra_repr(self):
        return "named"


class Doubled(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


def test_convert_keeps_the_objects_names_hooks_and_modes():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Sequential(nn.SyncBatchNorm(2), Named(2), nn.BatchNorm1d(3))
    )
    model[1].eval()
    layers, names, tensors = list(model.modules()), list(model.state_dict()), [id(p) for p in model.parameters()]
    seen = []
    model[2][1].register_forward_hook(lambda *_: seen.append("hook"))
    assert SyncBatchNorm.convert(model, None) is model
    assert all(before is after for before, after in zip(layers, model.modules(), strict=True))
    assert names == list(model.state_dict()) and tensors == [id(p) for p in model.parameters()]
    kinds = [isinstance(layer, SyncBatchNorm) for layer in model.modules()]
    assert kinds == [False, False, True, False, True, True, True]
    assert not model[1].training and isinstance(model[2][1], Named) and model[2][1].extra_repr() == "named"
    model[2][1](torch.randn(2, 2, 3, 3))
    assert seen == ["hook"]


def test_a_root_that_is_a_batch_norm_is_converted_too():
    assert isinstance(SyncBatchNorm.convert(nn.BatchNorm1d(3), None), SyncBatchNorm)


def with_its_own_forward():
    layer = nn.BatchNorm2d(2)
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(("layer", "words"), [
    (Doubled(2), "'1'.*Doubled.*has a forward of its own"),
    (with_its_own_forward(), "'1'.*forward set on the object"),
    (nn.LazyBatchNorm2d(), "'1'.*is lazy.*run the model once"),
])  # fmt: skip
def test_a_forward_that_would_be_lost_is_refused_and_nothing_is_changed(layer, words):
    model = nn.Sequential(nn.BatchNorm2d(2), layer)
    with pytest.raises(NotImplementedError, match=words):
        SyncBatchNorm.convert(model, None)
    assert type(model[0]) is nn.BatchNorm2d


def timm_layer(mesh):
    from timm.layers.norm_act import BatchNormAct2d

    x, gradient = batches((7, 3, 4, 5), steps=1)[0]
    mine = slice(0, 3) if mesh.rank == 0 else slice(3, 7)
    alone, _, buffers = trained(BatchNormAct2d(3, act_layer=nn.SiLU).double(), [(x, gradient)])
    layer = SyncBatchNorm.convert(BatchNormAct2d(3, act_layer=nn.SiLU).double(), mesh.data_group)
    found, _, my_buffers = trained(layer, [(x[mine], gradient[mine])])
    close(found, [whole[mine] for whole in alone])
    close(my_buffers, buffers)
    return isinstance(layer, BatchNormAct2d)


def test_timm_batch_norm_with_activation_keeps_its_activation():
    pytest.importorskip("timm")
    assert on_ranks(2, timm_layer) == [True, True]


def copies(mesh):
    layer = SyncBatchNorm.convert(nn.BatchNorm2d(3), mesh.data_group)
    copied = copy.deepcopy(layer)
    layer(torch.randn(2, 3, 4, 4))
    copied.load_state_dict(layer.state_dict())
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return copied.group is layer.group, loaded.group is None, torch.equal(copied.running_mean, layer.running_mean)


def test_copies_share_the_group_and_pickles_leave_it():
    assert on_ranks(2, copies) == [(True, True, True)] * 2


# ---------------------------------------------------------------------------------------------- refusals


def refusal(mesh, shape, channels):
    try:
        layer_over(channels, group=mesh.data_group)(torch.ones(shape[mesh.rank]))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("shapes", [[(1, 3), (0, 3)], [(0, 3, 2), (0, 3, 2)]], ids=["one", "none"])
def test_fewer_than_two_values_per_channel_are_refused_on_every_rank(shapes):
    for said in on_ranks(2, refusal, shapes, 3):
        assert said.startswith("Expected more than 1 value per channel when training, got ")


def test_two_ranks_with_one_value_each_are_enough():
    assert on_ranks(2, refusal, [(1, 3), (1, 3)], 3) == [None, None]


@pytest.mark.parametrize("shape", [(4, 2), (4,)])
def test_an_input_of_other_channels_is_refused(shape):
    for said in on_ranks(2, refusal, [shape, shape], 3):
        assert "it wants (N, 3, ...)" in said


def penalty_of(norm, x, mine):
    """What a penalty on the slope of a loss of some samples asks of the input and of the weights."""
    loss = (norm(x)[mine].sin() * torch.linspace(1, 2, 4, dtype=x.dtype)).sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + (slope[mine].exp()).sum()).backward()


def second_derivatives(mesh):
    """Of unequal shares of a batch: what differs from one device."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 4, generator=draw, dtype=torch.float64)
    whole, alone = nn.BatchNorm1d(2).double(), x.clone().requires_grad_()
    part = slice(0, 2) if mesh.rank == 0 else slice(2, 5)
    norm, mine = layer_over(2, group=mesh.data_group).double(), x[part].clone().requires_grad_()
    for layer in (whole, norm):
        nn.init.constant_(layer.weight, 1.5)
        nn.init.constant_(layer.bias, 0.3)
    penalty_of(whole, alone, slice(None))
    penalty_of(norm, mine, slice(None))
    parts = [mesh.sum_(p.grad.clone()) for p in norm.parameters()]
    close([mine.grad, *parts], [alone.grad[part], *(p.grad for p in whole.parameters())])


@on_gpu_too
def test_second_derivatives_are_those_of_the_whole_batch():
    on_ranks(2, second_derivatives)


# ---------------------------------------------------------------------------------------------- the cheap choices


def buffers_after(mesh, change):
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(3, track_running_stats=False))
    net[0].running_mean.fill_(mesh.rank + 1.0)
    net[0].running_var.fill_(10.0 * mesh.rank)
    net[0].num_batches_tracked.fill_(mesh.rank + 4)
    change(net, mesh)
    return [buffer.tolist() for buffer in net.buffers()]


@on_gpu_too
def test_running_statistics_are_averaged_over_ranks():
    found = on_ranks(3, buffers_after, average_running_statistics)
    assert [buffers[:2] for buffers in found] == [[[2.0, 2.0], [10.0, 10.0]]] * 3


@on_gpu_too
def test_rank_zeros_buffers_win():
    assert on_ranks(3, buffers_after, broadcast_buffers) == [[[1.0, 1.0], [0.0, 0.0], 4]] * 3


def test_on_one_rank_both_do_nothing():
    for change in (average_running_statistics, broadcast_buffers):
        assert on_ranks(1, buffers_after, change, plan=Plan()) == [[[1.0, 1.0], [0.0, 0.0], 4]]
