"""`stream`: makes a module run tile after tile.  It returns the same module, with the same parameter names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from widefield.capture.containers import refuse_hidden
from widefield.capture.fake_parameters import name_of, named_tensors, refuse_scripts, tensors_of
from widefield.capture.ir import Graph, Value, put_in
from widefield.capture.program_cache import Constant, ProgramCache, constants_of
from widefield.capture.python_watch import Guards
from widefield.capture.trace import trace, without_autocast
from widefield.fallback import Fallback
from widefield.geometry.layout import Cuts, Grid
from widefield.module_wrapping import Wrapping, wrap_class
from widefield.private_torch.fake_tensors import is_captured
from widefield.private_torch.modules import forward_hooks_of, forward_pre_hooks_of
from widefield.quantity import read_memory
from widefield.streaming.choice import choose
from widefield.streaming.differentiable import run_with_gradient, wrapped
from widefield.streaming.fallbacks import refusal_of
from widefield.streaming.fusion import CompiledRegions
from widefield.streaming.runner import Runner
from widefield.streaming.schedule import TileSchedule
from widefield.streaming.spatial import SpatialStream
from widefield.streaming.storage.memory_pool import Pool
from widefield.streaming.storage.offload_buffer import PLACES, ByteBudget
from widefield.streaming.storage.result_writer import ResultWriter
from widefield.streaming.storage.windowed_image import SINGLE_RANK, WindowedImage
from widefield.streaming.tile_planner import TracedOps, units_of
from widefield.tiled.tensor import TiledTensor


def stream(
    module: nn.Module,
    *,
    tiles: Sequence[int] | None = None,
    memory: str | int | None = None,
    keep: str | None = None,
    folder: str | Path | None = None,
    compile: bool = False,
    strict: bool = False,
) -> nn.Module:
    """Make `module` run tile after tile, with the outputs, gradients and buffers of a run on the whole image.

    The forward saves no activations inside of a segment, and the backward runs each tile again.  So a step takes the memory of
    one tile and of the tensors between segments (a BatchNorm, for example, needs all tiles before its output can be used).

    module: from tensors to tensors, images or vectors; it is returned as the same object, with its names, hooks and
        `state_dict`.  It is captured on fake tensors once for each shape of its inputs; hooks and prints of its submodules run
        in the capture only.
    tiles: the number of tiles along each image dim, as (4, 4).  Image dims are the last dims of an input with more dims.
    memory: how much memory a step may take on the device, as "6GiB" or bytes.  From this, the tiles, unless given, and what is
        stored between segments are chosen.
    keep: where tensors are stored between segments: "device", "host" (the CPU's memory) or "file".  None: on the device or,
        with `memory`, where they fit.  folder: the folder of such files; None: the system's for temporary files.
    compile: compile runs of pointwise operations with torch.compile, for tiles of any size at once.
    strict: raise if an operation would run on the whole image, because no rule cuts it; else
        `widefield.parallel.parallelize.fallbacks(module)` lists such operations, their place in the module and their bytes.
    Inputs may be tensors, `widefield.from_reader(...)`, or tiled tensors: then each rank streams its tile.
    Errors: ValueError for impossible sizes.  NotImplementedError, at the first call, if the module depends on values of
        tensors, has a torch.autograd.Function or, with `strict`, if an operation would run on the whole image; and in a
        backward with create_graph=True, if an operation has no second derivative, or in the backward of that if it is to be
        differentiated as well.
    """
    _check(module, tiles, memory, keep)
    wrap_class(module, Streamed)
    module._stream = Stream(  # type: ignore[assignment]
        None if tiles is None else tuple(tiles), memory, keep, folder, compile, strict
    )
    return module


def _check(module: Any, tiles: Sequence[int] | None, memory: str | int | None, keep: str | None) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"stream wants a torch.nn.Module, not a {type(module).__name__}; wrap a function in a module's forward"
        )
    if isinstance(module, Streamed):
        raise ValueError(f"this {type(module).__name__} is streamed already; build it anew to stream it otherwise")
    refuse_scripts(module, "streamed")
    for name, part in module.named_modules():
        if "_widefield_override" in vars(part):
            raise ValueError(
                f"{f'its part {name}' if name else 'this ' + type(part).__name__} is cut by channels or into stages, whose "
                "ranks have shards of its weights, and a stream would take them for full weights; set mesh.channel=1 and "
                "mesh.stage=1, or leave out widefield.stream"
            )
    if tiles is None and memory is None:
        raise ValueError("give tiles, as (4, 4), or memory, as '6GiB', or both")
    if memory is not None:
        _bytes_of(memory)
    if keep is not None and keep not in PLACES:
        raise ValueError(f"keep={keep!r} is no place to keep tensors in; it can be {', '.join(PLACES)}")
    if isinstance(tiles, int | float | str):
        raise ValueError(f"tiles={tiles!r} is to give a positive number for each image dim, as ({tiles}, {tiles})")
    if tiles is not None and (not len(tuple(tiles)) or any(not isinstance(n, int) or n < 1 for n in tiles)):
        raise ValueError(f"tiles={tiles!r} is to give a positive number for each image dim, as (4, 4)")


class Stream:
    """The settings of a streamed module, and its programs so far.  A copy or a pickle has the settings only."""

    def __init__(
        self,
        tiles: tuple[int, ...] | None,
        memory: str | int | None,
        keep: str | None,
        folder: Any,
        compile: bool = False,
        strict: bool = False,
    ) -> None:
        self.tiles, self.memory, self.keep, self.folder, self.compiles = tiles, memory, keep, folder, compile
        self.strict = strict
        self.known: ProgramCache[PreparedStream] = ProgramCache()
        self.pool = Pool(folder)
        self.reasons: list[str] = []
        """What was chosen for the last new shape of inputs and why, a sentence each."""
        self.fallbacks: list[Fallback] = []
        """The operations of it that do not run in tiles; the reasons name them too."""

    def __deepcopy__(self, memo: dict) -> Stream:
        return Stream(self.tiles, self.memory, self.keep, self.folder, self.compiles, self.strict)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "known": ProgramCache(), "pool": Pool(self.folder)}

    def program(self, module: nn.Module, args: tuple, kwargs: dict) -> PreparedStream:
        """The program for these arguments, captured and planned if it is not known yet."""
        return self.known.get(module, args, kwargs, partial(self._prepared, module, args, kwargs))

    def _prepared(self, module: nn.Module, args: tuple, kwargs: dict, guards: Guards) -> PreparedStream:
        forward = super(Streamed, module).forward  # type: ignore[misc]
        graph = trace(module, forward, args, kwargs, guards=guards)
        tensors = tensors_of((args, kwargs))
        grid = _grid_of(tensors)
        budget = None if self.memory is None else _bytes_of(self.memory)

        def read(tiles: tuple[int, ...]) -> TracedOps:
            spatial = SpatialStream(grid, tiles)
            cuts = {value: _cuts_of(tensor) for value, tensor in zip(graph.inputs, tensors, strict=True)}
            inputs = {value: spatial.cut(value.shape, cut) for value, cut in cuts.items() if value.ndim > len(tiles)}
            return units_of(graph, spatial.virtual, {value: layout for value, layout in inputs.items() if layout.is_cut})

        trains = torch.is_grad_enabled() and any(value.wants_grad for value in graph.results)
        windows = [number for number, tensor in enumerate(tensors) if not isinstance(tensor, Tensor)]
        choice = choose(
            graph, tiles=self.tiles, budget=budget, place=self.keep, fixed=0, trains=trains, read=read,
            extents=_extents_of(tensors), by_windows=windows, ranks=max(1, grid.size),
        )  # fmt: skip
        refusal = refusal_of(name_of(module), choice.tiles, choice.fallbacks) if self.strict else None
        if refusal is not None:
            raise refusal
        self.reasons, self.fallbacks, fused = choice.reasons, choice.fallbacks, CompiledRegions() if self.compiles else None
        constants = constants_of(module, graph)
        spatial, room = SpatialStream(grid, choice.tiles), ByteBudget(choice.room)
        return PreparedStream(choice.program, spatial, choice.place, constants, fused, room)


class PreparedStream(NamedTuple):
    """A schedule, the ranks that run it, and where it stores tensors.

    room: bytes of these that stay on the device, of all forwards together whose backward is still to come.
    """

    program: TileSchedule
    spatial: SpatialStream
    place: str
    constants: Mapping[Value, Constant]
    fused: CompiledRegions | None
    room: ByteBudget


def _cuts_of(tensor: Any) -> Cuts | None:
    return tensor.tile_layout.cuts if type(tensor) is TiledTensor else None


def _extents_of(tensors: Sequence[Any]) -> tuple[int, ...]:
    """The extents of the largest input's image dims, or of this rank's tile of it."""
    return max((_own_shape(tensor)[2:] for tensor in tensors if len(tensor.shape) > 2), key=math.prod, default=(1,))


def _own_shape(tensor: Any) -> tuple[int, ...]:
    if type(tensor) is TiledTensor:
        return tuple(tensor.tile_layout.tile_shape)
    if not isinstance(tensor, WindowedImage) or tensor.grid.size == 1:
        return tuple(tensor.shape)
    first = len(tensor.shape) - len(tensor.grid.sizes)
    return (*tensor.shape[:first], *(-(-n // ranks) for n, ranks in zip(tensor.shape[first:], tensor.grid.sizes, strict=True)))


def _bytes_of(memory: str | int) -> int:
    """A size such as 6GiB, or a number of bytes, in bytes.  ValueError: it is neither."""
    if not isinstance(memory, int):
        return read_memory(memory)
    if memory < 1:
        raise ValueError(f"memory={memory} leaves no byte to work in; write it as 6GiB or 512MiB")
    return memory


def _grid_of(tensors: Sequence[Any]) -> Grid:
    """The grid of ranks over which the inputs are tiled."""
    tiled = [tensor.tile_layout.grid for tensor in tensors if type(tensor) is TiledTensor]
    read = [tensor.grid for tensor in tensors if isinstance(tensor, WindowedImage) and tensor.grid.size > 1]
    return next(iter([*tiled, *read]), SINGLE_RANK)


class Streamed(Wrapping):
    """Put before a module's own class by `stream`.  Copies and pickles are streamed too."""

    COPIED, PREFIX = ("_stream",), "Streamed"
    _stream: Stream

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._run_tiles)(args, kwargs)
        return self._run_tiles(args, kwargs)

    def _run_tiles(self, args: tuple, kwargs: dict, writer: ResultWriter | None = None) -> Any:
        refuse_hidden(self, (args, kwargs), "is given")
        tensors = tensors_of((args, kwargs))
        if any(is_captured(tensor) for tensor in tensors):
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # a module that contains this one is being captured
        made = self._stream.program(self, args, kwargs)
        program, spatial = made.program, made.spatial
        graph, weights = program.graph, named_tensors(self)
        given: dict[Value, Any] = dict(zip(graph.inputs, tensors, strict=True))
        given |= {value: weights[name] for name, value in graph.weights.items()}
        given |= {value: constant.now() for value, constant in made.constants.items()}
        own = {value: tensor.local if type(tensor) is TiledTensor else tensor for value, tensor in given.items()}
        wanting = [value for value in given if value.wants_grad and (value.users or value in graph.results)]
        keeps = torch.is_grad_enabled() and bool(wanting)
        tiled = [value for value, tensor in given.items() if type(tensor) is TiledTensor and tensor.tile_layout.is_cut]
        where = {"place": made.place, "pool": self._stream.pool, "room": made.room}
        writers = {} if writer is None else {_only_result(graph): writer}
        run = Runner(program, spatial, own, tiled, keeps=keeps, fused=made.fused, writers=writers, **where)
        with without_autocast():
            if writer is not None:
                return run.forward()
            results = run_with_gradient(run, graph, given, wanting) if keeps else wrapped(run.forward(), run)
        with torch.no_grad():
            for name, value in graph.updates.items():
                weights[name].copy_(results[value])
        return put_in(graph.outputs, results)


def stream_to(
    write: Callable[[tuple[slice, ...], Tensor], None],
    module: nn.Module,
    *args: Any,
    is_written: Callable[[tuple[slice, ...]], bool] | None = None,
) -> None:
    """Run a streamed module without gradients, and give its output away tile by tile: it is never in memory as a whole.

    write(window, tile): gets the output's pixels in a window, a tuple of slices with a start and a stop, one per dim; the tile
        is on the output's device.  Windows do not overlap and together are the output, or this rank's tile of it.
    args: the module's inputs, as images by `from_reader`.
    is_written(window): whether an earlier run has written it; what only it needs is not run then.  The windows are the same for
        the same module, inputs and settings.
    ValueError: the module is not streamed, has hooks of its own, changes its buffers, or has more than one output.
    """
    if not isinstance(module, Streamed):
        raise ValueError(
            f"stream_to wants a streamed module, not a {type(module).__name__}; call widefield.stream(module, ...)"
        )
    if forward_hooks_of(module) or forward_pre_hooks_of(module):
        raise ValueError(
            f"this {type(module).__name__} has forward hooks, which want its whole output; remove them, or call the module"
        )
    with torch.no_grad():
        module._run_tiles(args, {}, ResultWriter(write, is_written))


def _only_result(graph: Graph) -> Value:
    """The result that is given away.  ValueError: there are others too."""
    (value, *more) = graph.results
    if more or graph.updates:
        what = "changes its buffers; call eval() on it" if graph.updates else f"has {len(graph.results)} outputs; give one"
        raise ValueError(f"stream_to gives away one output, and the module {what}")
    return value
