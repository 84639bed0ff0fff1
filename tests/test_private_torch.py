"""Does torch still do what this package relies on and torch does not promise?  Each name is asked by itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import pkgutil
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.prune import random_unstructured

import widefield
from widefield import private_torch

aten = torch.ops.aten
ROOM = Path(private_torch.__file__).parent
PYPROJECT = tomllib.loads((ROOM.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))


class Name:
    """A name of the room: what it is for, and, of one that stands for something of torch, the expression for that."""

    def __init__(self, file: Path, name: str, sentence: str | None, torchs: ast.expr | None) -> None:
        self.file, self.name, self.sentence, self.torchs = file, name, sentence, torchs

    @property
    def value(self) -> Any:
        return getattr(importlib.import_module(f"widefield.private_torch.{self.file.stem}"), self.name)

    def __str__(self) -> str:
        return f"{self.file.name}: {self.name}"


def names_in(file: Path) -> list[Name]:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    found = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(Name(file, node.name, ast.get_docstring(node), None))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            found.append(Name(file, ast.unparse(target), _text_of(after), node.value))
    return found


def _text_of(node: ast.stmt | None) -> str | None:
    return node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None


FILES = [file for file in sorted(ROOM.glob("*.py")) if file.stem != "__init__"]
NAMES = [name for file in FILES for name in names_in(file)]


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_each_name_says_in_words_what_it_is_for(name):
    assert name.sentence is not None and name.sentence.rstrip().endswith(".")
    assert not name.name.startswith("_")


@pytest.mark.parametrize("name", [name for name in NAMES if name.torchs is not None], ids=str)
def test_torch_has_it(name):
    """Asked without the room, which could not be imported if a name were gone."""
    space: dict[str, Any] = {}
    tree = ast.parse(name.file.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    try:
        exec(compile(ast.Module(imports, []), str(name.file), "exec"), space)
        eval(compile(ast.Expression(name.torchs), str(name.file), "eval"), space)
    except (AttributeError, ImportError) as error:
        raise AssertionError(_lost(name)) from error


def _lost(name: Name) -> str:
    return f"torch {torch.__version__} has no longer what private_torch/{name} is there for: {name.sentence}"


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_torch_does_what_is_relied_on(name):
    try:
        CHECKS[name.name](name.value)
    except Exception as error:
        raise AssertionError(_lost(name)) from error


# ---------------------------------------------------------------------------------------------- what is relied on


def image() -> Tensor:
    return torch.arange(6.0).reshape(2, 3).clone()


def node_of_relu():
    """The autograd node of a new result."""
    return torch.ones(2, requires_grad=True).relu().grad_fn


def in_backward(look: Callable[[], Any]) -> Any:
    """What `look` gives in a hook of a leaf, while `backward` runs."""
    leaf, seen = torch.ones(2, requires_grad=True), []
    leaf.register_hook(lambda grad: seen.append(look()))
    (leaf * 2).sum().backward()
    return seen[0]


def in_a_thread(call: Callable[[], Any]) -> Any:
    """What `call` gives on a thread of its own, whose switches end with it."""
    given: list[Any] = []
    thread = threading.Thread(target=lambda: given.append(call()))
    thread.start()
    thread.join()
    return given[0]


def check_wrapper(make):
    class Wrapper(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return seen.append(func) or image()

    seen: list[Any] = []
    made = make(Wrapper, (2, 3), strides=(1, 2), dtype=torch.float64, device="cpu")
    assert type(made) is Wrapper and made.shape == (2, 3) and made.stride() == (1, 2) and made.dtype is torch.float64
    torch.relu(made)
    assert seen == [aten.relu.default]


def check_no_torch_function(impl):
    class Plain(Tensor):
        __torch_function__ = impl

    assert type(torch.relu(image().as_subclass(Plain))) is Tensor


def check_replay(switch):
    def formula() -> str:
        switch(True)
        whole = torch.ones(2, 3, requires_grad=True).clone()
        view = whole[0]
        whole.mul_(2)
        return view.grad_fn.name()

    assert in_a_thread(formula) == "SelectBackward0"


def check_engine(code):
    def frames() -> list:
        frame, found = sys._getframe(), []
        while frame is not None:
            found.append(frame.f_code)
            frame = frame.f_back
        return found

    assert code in in_backward(frames)


def check_callback(queue):
    told = []
    in_backward(lambda: (queue(lambda: told.append("over")), told.append("in")))
    assert told == ["in", "over"]


def check_will_execute(will):
    leaf, seen = torch.ones(2, requires_grad=True), []
    node = torch._C._current_autograd_node

    def hook(grad: Tensor) -> None:
        try:
            seen.append(will(node()))
        except RuntimeError:
            seen.append("asked for")

    leaf.register_hook(hook)
    (leaf * 2).sum().backward()
    torch.autograd.grad((leaf * 2).sum(), leaf)
    assert seen == [True, "asked for"]


def check_exclude(guard):
    class Aliases(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is aten.mul.Tensor:
                with guard(torch._C.DispatchKey.ADInplaceOrView, False):
                    kept.append(out.detach())
            return out

    kept: list[Tensor] = []
    with Aliases():
        made = image() * 2
    made.add_(1)
    assert kept[0]._version == made._version == 1


def check_below_autograd(guard):
    leaf = torch.ones(2, requires_grad=True)
    with guard():
        assert (leaf * 2).grad_fn is None


def check_mode(mode):
    seen = []

    class Looks(mode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = image()
    with Looks():
        x.relu()
        for nobody_looks in (torch.utils._python_dispatch._disable_current_modes, torch.utils._mode_utils.no_dispatch):
            with nobody_looks():
                x.relu()
    assert seen == [aten.relu.default]


def check_effectful(register):
    from torch._library import effects, simple_registry

    from widefield.comm import halo

    assert halo.register_effectful_op is register
    holder = simple_registry.singleton.find("widefield::exchange").effect
    assert holder.effect is effects.EffectType.ORDERED


def check_destroy(destroy):
    before = torch._C._dispatch_dump("aten::relu6")
    library = torch.library.Library("aten", "IMPL")
    library.impl("relu6", lambda keys, x: x, "PythonTLSSnapshot", with_keyset=True)
    assert torch._C._dispatch_dump("aten::relu6") != before
    destroy(library)
    assert torch._C._dispatch_dump("aten::relu6") == before


def functional(x: Tensor) -> Any:
    with torch._subclasses.functional_tensor.FunctionalTensorMode():
        return torch._subclasses.functional_tensor.FunctionalTensor.to_functional(x)


def check_functional_mode(mode):
    plain = image()
    with mode():
        written = torch._subclasses.functional_tensor.FunctionalTensor.to_functional(plain)
        seen = written.elem
        written.fill_(7)
        torch._sync(written)
    assert torch._from_functional_tensor(seen)[0].tolist() == [7, 7, 7] and torch.equal(plain, image())


def check_fake(kind):
    with torch._subclasses.fake_tensor.FakeTensorMode():
        made = torch.empty(2, 3).t().relu()
    assert isinstance(made, kind) and made.stride() == (1, 3) and made.device.type == "cpu"


def in_modes(**of_last):
    """A real tensor, one of a capture, and one of a program that is run without numbers."""
    modes = torch._subclasses.fake_tensor.FakeTensorMode(), private_torch.fake_tensors.EmulatedFakeMode(**of_last)
    found = [torch.ones(2)]
    for mode in modes:
        with mode:
            found.append(torch.ones(2))
    return found


def check_fake_mode(mode):
    with mode(allow_non_fake_inputs=True):
        assert isinstance(torch.ones(2) * 2, torch._subclasses.fake_tensor.FakeTensor)


def check_emulated_mode(mode):
    check_fake_mode(mode)
    fakes = torch._subclasses.fake_tensor.FakeTensorMode
    for kind, is_kept in ((fakes, True), (mode, False)):
        with mock.patch.object(fakes, "_cached_dispatch_impl", side_effect=NotImplementedError) as cached, kind():
            try:
                torch.ones(2)
            except NotImplementedError:
                pass
        assert cached.called is is_kept


def check_values_asked(kind):
    with torch._subclasses.fake_tensor.FakeTensorMode(), pytest.raises(kind):
        torch.ones(2).sum().item()


def check_shapes_asked(kind):
    with torch._subclasses.fake_tensor.FakeTensorMode(), pytest.raises(kind):
        torch.ones(2).nonzero()


def check_sync(sync):
    plain = image()
    with torch._subclasses.functional_tensor.FunctionalTensorMode():
        whole = torch._subclasses.functional_tensor.FunctionalTensor.to_functional(plain)
        whole[0].fill_(7)
        sync(whole)
    assert torch._from_functional_tensor(whole.elem)[0].tolist() == [7, 7, 7]


def check_logger(name):
    record = []
    handler = logging.Handler()
    handler.emit = record.append
    logging.getLogger(name).addHandler(handler)
    try:
        with torch._subclasses.fake_tensor.FakeTensorMode(), pytest.raises(RuntimeError):
            torch.ones(2) @ torch.ones(3)
    finally:
        logging.getLogger(name).removeHandler(handler)
    assert record


def check_rnn_members(names):
    held = vars(nn.LSTM(2, 2))
    assert all(name in held for name in names)


def check_weight_made_by(made_by):
    pruned = random_unstructured(nn.Linear(2, 2), "weight", 1)
    normed = nn.utils.spectral_norm(nn.Linear(2, 2), "weight")
    hooks = [hook for layer in (pruned, normed) for hook in layer._forward_pre_hooks.values()]
    assert [made_by(hook) for hook in hooks] == ["weight", "weight"]


def check_parametrize_cache(read):
    assert read() == (0, {})
    with nn.utils.parametrize.cached():
        assert read()[0] == 1


def check_set_parametrize_cache(put):
    with nn.utils.parametrize.cached():
        put((0, {}))
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        assert layer.weight is not layer.weight
        put((1, {}))
        assert layer.weight is layer.weight


def check_compiled(compiled_of):
    module = nn.Linear(2, 2)
    assert compiled_of(module) is None
    module.compile(backend="eager")
    assert compiled_of(module) is not None


def check_shutdown(end):
    batches = iter(torch.utils.data.DataLoader([1, 2, 3], num_workers=1))
    workers = list(batches._workers)
    end(batches)
    assert not any(worker.is_alive() for worker in workers)
    end(iter([1]))


def check_is_view(is_view):
    whole = image()
    assert is_view(whole[0]) and not is_view(whole)


def check_base(base_of):
    whole = image()
    assert base_of(whole[0]) is whole and base_of(whole) is None


def check_version(version):
    whole = image()
    before = version(whole)
    whole[0].add_(1)
    assert version(whole) == version(whole[1]) == before + 1


def check_alias(is_alias):
    whole = image()
    assert is_alias(whole, whole[0]) and not is_alias(whole, image())


def check_use_count(count):
    whole = image()
    before = count(whole.untyped_storage()._cdata)
    view = whole[0]
    assert count(view.untyped_storage()._cdata) == before + 1


def check_cdata(cdata):
    whole = image()
    assert cdata(whole.untyped_storage()) == cdata(whole[0].untyped_storage()) != cdata(image().untyped_storage())
    assert cdata(torch.default_generator) != cdata(torch.Generator())


def check_foreach_mul(scale):
    scaled = [image(), image()]
    scale(scaled, 2.0)
    assert all(torch.equal(each, image() * 2) for each in scaled)


def outside_and_inside(mark, outside, inside):
    """What a function gives that was marked, where torch.compile meets it outside of a graph and in one; compiled it is 15."""

    def called(x):
        return x.sin() + 5 if torch.compiler.is_compiling() else x.cos()

    function = eval("lambda x: called(x)", {"called": called})  # whose code is no other's, for that is what is marked

    def found(run):
        torch.compiler.reset()
        return torch.compile(lambda x: run(x) * 3, backend="eager")(torch.zeros(1)).item()

    apart = torch.compiler.disable(lambda x: function(x), recursive=False)
    assert (found(apart), found(function)) == (15, 15)
    mark(function)
    assert (found(apart), found(function)) == (outside, inside)


def check_mark_static(mark_static):
    """torch.compile takes what is marked for constants; other sizes become variables."""
    graphs = []
    for marks in (True, False):
        torch.compiler.reset()
        call = torch.compile(lambda x: x * 2, backend=lambda graph, inputs: graphs.append(inputs) or graph.forward)
        for size in (3, 4, 5):
            number = torch.ones(size)
            if marks:
                mark_static(number)
            call(number)
    assert len(graphs) == 3 + 2, "a graph for each size, and then one and one for any size"


def check_schema(schema_of):
    schema = schema_of(aten.add_.Tensor)
    assert schema.name == "aten::add_" and schema.is_mutable and len(schema.returns) == 1
    assert [argument.name for argument in schema.arguments if argument.kwarg_only] == ["alpha"]
    assert schema.arguments[0].alias_info.is_write and schema.arguments[1].alias_info is None


def check_op_dk(op_dk_of):
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    (negative,) = op_dk_of(aten._foreach_neg.default)(key, [image()])
    assert torch.equal(negative, -image())


def check_keys_below(after):
    keys = torch._C.DispatchKey
    below = after(keys.PythonTLSSnapshot)
    assert below.has(keys.AutogradCPU) and below.has(keys.Python) and not below.has(keys.PythonTLSSnapshot)


def check_included(is_included):
    seen = []

    class Looks(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Looks(), torch._C._EnablePythonDispatcher():
        seen.append(is_included("PythonDispatcher"))
    assert seen == [True] and not is_included("PythonDispatcher")


def check_children(modules_of):
    net = nn.Sequential(NORM)
    modules_of(net)["more"] = nn.ReLU()
    assert list(modules_of(net)) == ["0", "more"] and len(list(net.children())) == 2


def check_pre_hooks(hooks_of):
    layer = nn.ReLU()
    layer.register_forward_pre_hook(print)
    assert list(hooks_of(layer).values()) == [print]


def check_forward_hooks(hooks_of):
    layer = nn.ReLU()
    layer.register_forward_hook(print)
    assert list(hooks_of(layer).values()) == [print]


def check_backward_hooks(hooks_of):
    leaf = torch.ones(2, requires_grad=True)
    assert not hooks_of(leaf)
    leaf.register_hook(print)
    assert list(hooks_of(leaf).values()) == [print]


def check_stage_backward(run):
    assert list(inspect.signature(run).parameters)[:3] == ["stage_output", "output_grads", "input_values"]


def check_sleep_on_gpu(sleep) -> None:
    with mock.patch.object(torch.cuda, "_sleep") as asked:
        sleep(0.25)
    asked.assert_called_once_with(500_000_000)


def check_flight_records(read) -> None:
    assert all("entries" not in text or "collective_seq_id" in text for text in read())
    assert any(name.endswith("_trace_json") for name in dir(torch._C._distributed_c10d))


def check_group_hooks(hooked) -> None:
    if not hasattr(dist.ProcessGroup, "register_pre_hook"):
        return  # a torch before 2.14, where first steps are not compared
    called, store = [], dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        close = hooked(dist.group.WORLD, lambda operation, tensors: called.append((operation, tensors[0].shape)))
        dist.all_reduce(torch.ones(3))
        close()
        dist.all_reduce(torch.ones(4))
    finally:
        dist.destroy_process_group()
    assert called == [("ALLREDUCE", torch.Size([3]))]


def check_sequence_number(number) -> None:
    """Of a group as ranks on GPUs have it: with a backend for each kind of device, of which the group itself says 0."""
    dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = number(dist.group.WORLD)
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3))
        assert number(dist.group.WORLD) - before == 2
    finally:
        dist.destroy_process_group()


def check_messages_of_stages(replaced) -> None:
    from torch.distributed.pipelining import schedules

    with replaced(lambda post: lambda operations, desc=None: (post(operations, desc), "asked")):
        assert schedules._batch_p2p([]) == ([], "asked")
    assert schedules._batch_p2p([]) == []


def holds(found: Any) -> None:
    assert found


NORM = nn.BatchNorm2d(3)
CHECKS: dict[str, Callable[[Any], None]] = {
    # tensors.py
    "make_wrapper_subclass": check_wrapper,
    "disabled_torch_function_impl": check_no_torch_function,
    "is_view": check_is_view,
    "base_of": check_base,
    "version_counter": check_version,
    "is_alias_of": check_alias,
    "storage_use_count": check_use_count,
    "cdata": check_cdata,
    "foreach_norm": lambda norm: holds([float(n) for n in norm([torch.tensor([3.0, 4.0]), torch.ones(1)])] == [5, 1]),
    "foreach_mul_": check_foreach_mul,
    "standard_gamma": lambda gamma: holds((gamma(torch.full((9,), 2.0)) > 0).all()),
    "mark_static": check_mark_static,
    "weight_norm": lambda norm: holds(norm(torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0]]), 0).tolist() == [[6, 8]]),
    # autograd.py
    "profiler_enabled": lambda enabled: holds(enabled() is False),
    "current_graph_task_id": lambda task: holds(task() == -1 and in_backward(task) >= 0),
    "current_autograd_node": lambda node: holds(
        node() is None and in_backward(lambda: node().name()) == "torch::autograd::AccumulateGrad"
    ),
    "next_node_number": lambda number: holds(node_of_relu()._sequence_nr() + 1 == number()),
    "node_number_of": lambda of: holds(of(node_of_relu()) < of(node_of_relu())),
    "will_engine_execute_node": check_will_execute,
    "engine_run_backward_code": check_engine,
    "queue_callback": check_callback,
    "set_view_replay_enabled": check_replay,
    # dispatcher.py
    "never_compile": lambda never_compile: outside_and_inside(never_compile, 3, 15),
    "ends_graphs": lambda ends_graphs: outside_and_inside(ends_graphs, 3, 3),
    "DispatchKey": lambda key: holds([key.PythonTLSSnapshot, key.ADInplaceOrView, key.CompositeExplicitAutograd]),
    "OpOverload": lambda kind: holds(isinstance(aten.add.Tensor, kind) and not isinstance(torch.add, kind)),
    "schema_of": check_schema,
    "op_of": lambda op_of: holds(torch.equal(op_of(aten.relu.default)(image()), image())),
    "op_dk_of": check_op_dk,
    "dispatch_keyset_full_after": check_keys_below,
    "dispatch_tls_is_dispatch_key_included": check_included,
    "dispatch_has_kernel_for_dispatch_key": lambda has: holds(
        has("aten::reshape", "CompositeImplicitAutograd") and not has("aten::relu", "CompositeImplicitAutograd")
    ),
    "SetExcludeDispatchKeyGuard": check_exclude,
    "AutoDispatchBelowAutograd": check_below_autograd,
    "TorchDispatchMode": check_mode,
    "disable_current_modes": lambda disable: check_mode(torch.utils._python_dispatch.TorchDispatchMode),
    "no_dispatch": lambda no: check_mode(torch.utils._python_dispatch.TorchDispatchMode),
    "EffectType": lambda kinds: holds(kinds.ORDERED),
    "register_effectful_op": check_effectful,
    "destroy_library": check_destroy,
    # decompositions.py
    "decomposition_table": lambda table: holds(aten.native_layer_norm_backward.default in table),
    "get_decompositions": lambda get: holds(list(get([aten.hardtanh.default])) == [aten.hardtanh.default]),
    # fake_tensors.py
    "FakeTensor": check_fake,
    "FakeTensorMode": check_fake_mode,
    "EmulatedFakeMode": check_emulated_mode,
    "is_captured": lambda captured: holds([captured(one) for one in in_modes()] == [False, True, False]),
    "runs_on_gpu": lambda runs: holds(
        [runs(one) for one in in_modes()] == [False] * 3 and runs(in_modes(of_gpu=True)[2]) and not runs(image())
    ),
    "is_eager": lambda eager: holds([eager(one) for one in in_modes()] == [True, False, True]),
    "is_emulated": lambda emulated: holds([emulated(one) for one in in_modes()] == [False, False, True]),
    "DataDependentOutputException": check_values_asked,
    "DynamicOutputShapeException": check_shapes_asked,
    "FunctionalTensor": lambda kind: holds(isinstance(functional(image()), kind)),
    "FunctionalTensorMode": check_functional_mode,
    "from_functional_tensor": lambda inner: holds(torch.equal(inner(functional(image()).elem), image())),
    "sync": check_sync,
    "suggest_memory_format": lambda suggest: holds(
        suggest(torch.empty(2, 3, 4, 5, memory_format=torch.channels_last)) is torch.channels_last
    ),
    "FAKE_TENSOR_LOGGER": check_logger,
    # modules.py
    "BatchNorm": lambda kind: holds(isinstance(NORM, kind) and isinstance(nn.SyncBatchNorm(3), kind)),
    "NormBase": lambda kind: holds(isinstance(NORM, kind) and isinstance(nn.InstanceNorm2d(3), kind)),
    "InstanceNorm": lambda kind: holds(isinstance(nn.InstanceNorm3d(3), kind) and not isinstance(NORM, kind)),
    "DropoutNd": lambda kind: holds(all(isinstance(layer(), kind) for layer in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))),
    "parameters_of": lambda of: holds(list(of(NORM)) == ["weight", "bias"] and of(NORM) is of(NORM)),
    "buffers_of": lambda of: holds("running_mean" in of(NORM) and of(NORM) is of(NORM)),
    "modules_of": check_children,
    "MODULE_MEMBERS": lambda names: holds(all(type(vars(NORM)[name]) is dict for name in names)),
    "forward_pre_hooks_of": check_pre_hooks,
    "forward_hooks_of": check_forward_hooks,
    "backward_hooks_of": check_backward_hooks,
    "RNN_MEMBERS": check_rnn_members,
    "call_impl_of": lambda of: holds(of(nn.ReLU())(image()).equal(image())),
    "compiled_call_impl_of": check_compiled,
    "weight_made_by": check_weight_made_by,
    "parametrize_cache": check_parametrize_cache,
    "set_parametrize_cache": check_set_parametrize_cache,
    # pytree.py
    "tree_map": lambda over: holds(over(lambda x: -x, {"a": [1, (2,)]}) == {"a": [-1, (-2,)]}),
    "tree_leaves": lambda leaves: holds(leaves({"a": [1, (2, None)]}) == [1, 2, None]),
    "tree_flatten": lambda flat: holds(flat([1, (2,)])[0] == [1, 2] and flat([1, (2,)])[1] == flat([3, (4,)])[1]),
    "tree_unflatten": lambda put: holds(put([3, 4], torch.utils._pytree.tree_flatten([1, (2,)])[1]) == [3, (4,)]),
    # loaders.py
    "shutdown_workers": check_shutdown,
    # process_groups.py: the ranks of tests/comm use them
    "c10d_world": lambda world: holds(isinstance(world.pg_map, dict)),
    "get_default_store": callable,
    "resolve_process_group": callable,
    "abort": lambda _: holds(dist.ProcessGroup._get_backend),
    "sequence_number": check_sequence_number,
    "flight_records": check_flight_records,
    "sleep_on_gpu": check_sleep_on_gpu,
    "group_hooks": check_group_hooks,
    # pipelining.py, dtensor.py
    "stage_backward": check_stage_backward,
    "messages_of_stages": check_messages_of_stages,
    "clear_sharding_prop_cache": lambda clear: holds(clear() is None),
}


def test_every_name_is_asked():
    assert {name.name for name in NAMES} == set(CHECKS)


# ---------------------------------------------------------------------------------------------- which torch


def bounds(package: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """From which version on pyproject.toml takes a package, and below which."""
    (line,) = [line for line in PYPROJECT["project"]["dependencies"] if line.startswith(f"{package}>=")]
    least, most = line.removeprefix(f"{package}>=").split(",<")
    return tuple(map(int, least.split("."))), tuple(map(int, most.split(".")))


def test_pyproject_allows_the_versions_that_were_tried():
    (major, newest) = private_torch.NEWEST
    assert bounds("torch") == (private_torch.OLDEST, (major, newest + 1))
    ahead = 15  # torchvision 0.26 came with torch 2.11, and 0.30 with 2.15
    assert bounds("torchvision") == ((0, private_torch.OLDEST[1] + ahead), (0, newest + ahead + 1))


def test_the_installed_torch_is_one_of_them():
    installed = tuple(map(int, torch.__version__.split(".")[:2]))
    assert private_torch.OLDEST <= installed <= private_torch.NEWEST


def test_the_quick_start_names_them():
    text = (ROOM.parents[1] / "docs" / "quickstart.md").read_text(encoding="utf-8")
    oldest, newest = (".".join(map(str, version)) for version in (private_torch.OLDEST, private_torch.NEWEST))
    assert f"torch {oldest} to {newest}" in text


# ---------------------------------------------------------------------------------------------- private methods defined anew


def test_no_class_puts_a_private_method_of_torch_s_in_place_unsaid():
    for module in pkgutil.walk_packages(widefield.__path__, "widefield."):
        if module.name != "widefield.__main__":
            importlib.import_module(module.name)
    found = {
        f"{kind.__name__}.{name}"
        for kind in _subclasses(object)
        if str(kind.__module__).startswith("widefield.") and not kind.__module__.startswith(private_torch.__name__)
        for name in vars(kind)
        if name.startswith("_") and not name.startswith("__") and name not in SET_BY_METACLASSES and _is_torchs(kind, name)
    }
    assert found == set(private_torch.OVERRIDDEN)


SET_BY_METACLASSES = {"_backward_cls", "_abc_impl"}
"""What torch puts into each autograd.Function, and Python into each abstract class."""


def _subclasses(kind: type) -> set[type]:
    below = [each for each in type.__subclasses__(kind) if each is not type]
    return {*below}.union(*map(_subclasses, below)) if below else set()


def _is_torchs(kind: type, name: str) -> bool:
    return any(name in vars(base) for base in kind.__mro__[1:] if base.__module__.split(".")[0] == "torch")
