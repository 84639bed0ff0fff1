"""Who are the ranks of this run?  A World comes from the launcher, a Mesh from a Plan.

The collectives here are those that training needs besides the strategies' own.  On a single rank there is no process group,
and every call returns at once.
"""

from __future__ import annotations

import datetime
import gc
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from widefield.comm import collectives, cores_of_ranks, process_groups
from widefield.comm.at_exit import settle_before_exit
from widefield.comm.devices import RANKS_PER_GPU, backend_for, backward_in_this_thread, device_of, gpu_of, passes_the_host
from widefield.comm.interfaces import interfaces_in_words
from widefield.comm.meeting import placed_on_machine, rendezvous_seconds, store_of_meeting
from widefield.comm.world import AgreedError, World
from widefield.geometry.layout import Grid
from widefield.plans import Plan, check
from widefield.plans.links import slow_links
from widefield.private_torch.process_groups import c10d_world

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run on the axes of its plan: replicate outermost, then shard, space, channel, stage.

    On a single rank every group is None.
    group: all ranks.
    checkpoint_group: all ranks, with gloo, for messages of a background thread and for parts of a model sent to rank 0.
    data_group: the ranks with the same part of the model (replicate x shard x space), which average its gradients.
    statistics_group: the same ranks, for BatchNorm's small messages, which would wait behind gradient buckets of 25 MiB.
    channel_group, stage_group: the ranks along that axis; None where its size is 1.
    copy_group: the ranks that share this rank's images, with gloo; None where a copy of the model is on one rank.
    devices: torch's DeviceMesh of the axes of more than one rank, with `space0`, `space1`, ... for space.
    """

    plan: Plan
    world: World
    device: torch.device
    devices: DeviceMesh | None = None
    group: dist.ProcessGroup | None = None
    data_group: dist.ProcessGroup | None = None
    statistics_group: dist.ProcessGroup | None = None
    checkpoint_group: dist.ProcessGroup | None = None
    channel_group: dist.ProcessGroup | None = None
    stage_group: dist.ProcessGroup | None = None
    copy_group: dist.ProcessGroup | None = None
    grid: Grid = Grid(())
    """The ranks that share this rank's images, cut in space."""
    shards: DeviceMesh | None = None
    """The ranks of `data_group` as (replicate, shard x space), or (shard x space) where replicate is 1: weights are sharded
    over the last axis.  None where shard is 1."""
    opened: bool = False
    """Whether `join` initialized torch.distributed, so that `leave` destroys its default group."""
    made: tuple[dist.ProcessGroup, ...] = ()
    """The groups that `join` made."""
    rows: list[Grid] = field(default_factory=list, compare=False)
    """The result of `grid_of_rows` after its first call."""
    further: list[dist.ProcessGroup] = field(default_factory=list, compare=False)
    """Groups made after `join`, which `leave` destroys."""
    lent: list[tuple[dist.ProcessGroup, weakref.ref]] = field(default_factory=list, compare=False)
    """Groups made by `lend_group`, each with a weak reference to its borrower."""
    watch: Any = None
    """The running FailureWatch, or None."""
    of_all: Mesh | None = field(default=None, repr=False, compare=False)
    """Of the mesh of one replica (replica_mesh.py), whose ranks are some of the run's: that of all ranks."""

    def __str__(self) -> str:
        """As `Mesh(replicate=2 x space=[2, 1]; rank 1 of 4 on cpu)`."""
        return f"Mesh({self.plan}; rank {self.rank} of {self.size} on {self.device})"

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def side_by_side(self) -> int:
        """How many meshes like this one the ranks of the run are divided into: groups are made for all of them at once."""
        return 1 if self.of_all is None else self.of_all.size // self.size

    @property
    def reasons(self) -> list[str]:
        """What a user should know of how the ranks communicate, a sentence each."""
        between = [] if self.group is None or self.world.has_one_host else self._between_machines
        if not passes_the_host(self.group, self.device):
            return between
        return [
            "messages between GPUs go by gloo through the host's memory, as where ranks share a GPU: NCCL takes one rank per "
            f"GPU; for speed, start one rank per GPU and leave {RANKS_PER_GPU} out",
            *between,
        ]

    @property
    def _between_machines(self) -> list[str]:
        """The network interface, and the axes that would better be on one machine."""
        machines = -(-self.world.size // max(1, self.world.local_size))
        return [f"{machines} machines: {interfaces_in_words()}", *slow_links(self.plan, max(1, self.world.local_size))]

    @property
    def copies(self) -> int:
        """The number of data-parallel copies of the model; each sample belongs to one copy, whose ranks share it."""
        return self.plan.replicate * self.plan.shard

    @property
    def copy(self) -> int:
        """The index of this rank's copy, from 0; the ranks of a copy are consecutive."""
        return self.world.rank * self.copies // self.world.size

    @property
    def is_first_of_copy(self) -> bool:
        """Whether this rank is the first of its copy: it counts what is the same on every rank of the copy."""
        return self.world.rank % (self.world.size // self.copies) == 0

    @property
    def data_size(self) -> int:
        """The size of `data_group`: replicate x shard x space."""
        return self.size // (self.plan.channel * self.plan.stage)

    @property
    def channel(self) -> int:
        """This rank's coordinate on the axis `channel`."""
        return self.world.rank // self.plan.stage % self.plan.channel

    @property
    def stage(self) -> int:
        """This rank's coordinate on the axis `stage`, the innermost."""
        return self.world.rank % self.plan.stage

    @property
    def is_first_of_tile(self) -> bool:
        """Whether this rank is the first of those with the same pixels: it counts what is in them."""
        return self.channel == 0 and self.stage == 0

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes the run's files."""
        return self.world.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """All-reduce: the sum of `tensor` over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def mean_(self, tensor: Tensor) -> Tensor:
        """All-reduce: the mean of `tensor` over `data_group`, in place."""
        if self.data_group is not None:
            dist.all_reduce(tensor, group=self.data_group)
            tensor.div_(self.data_size)
        return tensor

    def least_of_copy(self, numbers: list[int]) -> list[int]:
        """The elementwise minimum of `numbers` over the ranks that share this rank's images."""
        if self.copy_group is None:
            return numbers
        least = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.copy_group)
        return least.tolist()

    def start_sum(self, tensor: Tensor) -> Callable[[], list[float]]:
        """Start to sum `tensor` over all ranks; the function returned waits and gives the sums as Python numbers.

        On a GPU the wait is only for kernels queued before this call, so that a step's loss can be read while its backward
        pass runs.
        """
        work = None if self.group is None else dist.all_reduce(tensor, group=self.group, async_op=True)
        if tensor.device.type != "cuda":
            return lambda: (work.wait() if work is not None else None, tensor.tolist())[1]
        return collectives.copy_to_host_async(tensor, work)

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with that of the first rank of `data_group`."""
        if self.data_group is not None:
            dist.broadcast(tensor, group_src=0, group=self.data_group)
        return tensor

    def broadcast_all_(self, tensors: Sequence[Tensor]) -> None:
        """`broadcast_` of each tensor, of any memory format, in messages of up to BROADCAST_BYTES."""
        for run in collectives.runs_of(tensors, BROADCAST_BYTES) if self.data_group is not None else ():
            flat = self.broadcast_(torch.cat([tensor.reshape(-1) for tensor in run]))
            for tensor, values in zip(run, flat.split([tensor.numel() for tensor in run]), strict=True):
                tensor.copy_(values.view(tensor.shape))

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def lend_group(self, borrower: Any) -> dist.ProcessGroup:
        """A group with the ranks of `data_group` that nobody else uses while `borrower` lives; every rank must call it.

        Within a group messages must have the same order on every rank; the messages of two models, or of a model and its
        user's code, may be in another order on each rank.
        """
        idle = self._idle_everywhere()
        if not idle and len(self.lent) >= LENT_MOST:
            gc.collect()  # frees dead borrowers that are in reference cycles
            idle = self._idle_everywhere()
        number = min(idle, default=len(self.lent))
        group = self.lent[number][0] if idle else process_groups.data_group(self.plan, self.side_by_side)
        if self.of_all is not None and not idle:
            self.of_all.further.append(group)
        self.lent[number : number + 1] = [(group, weakref.ref(borrower))]
        return group

    def _idle_everywhere(self) -> set[int]:
        """The groups whose borrower is dead on every rank: ranks free objects at different times."""
        idle = {number for number, (_, borrower) in enumerate(self.lent) if borrower() is None}
        return set.intersection(*(self.of_all or self).gather_objects(idle))  # all ranks make groups together

    def grid_of_rows(self) -> Grid:
        """The ranks of `data_group` as a grid: copies first, then the tiles of an image.

        Every rank must call it: the first call makes the grid's groups.
        """
        if not self.rows:
            grid, made = process_groups.grid_of_rows(self.plan, self.grid, copy=self.copy, meshes=self.side_by_side)
            self.rows.append(grid)
            (self.of_all or self).further.extend(made)
        return self.rows[0]

    def barrier(self) -> None:
        """Wait until every rank calls it."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def agree(self, problem: str | None) -> None:
        """Raise AgreedError on every rank if any rank has a problem; the text is that of the first such rank.

        Every rank must call it.  So no rank waits for messages of a rank that has stopped.
        """
        problems = [f"rank {rank}: {text}" if self.size > 1 else text
                    for rank, text in enumerate(self.gather_objects(problem)) if text is not None]  # fmt: skip
        if problems:
            raise AgreedError(problems[0])

    def call_to_agree(self) -> None:
        """Ask all ranks to call `agree` soon, because this rank has a problem."""
        if self.watch is not None:
            self.watch.ask_to_stop()

    @property
    def is_called_to_agree(self) -> bool:
        """Whether a rank has called `call_to_agree`; other ranks notice it at different times."""
        return self.watch is not None and self.watch.stops

    def together(self, work: Callable[[], T]) -> T:
        """Call `work` on every rank; if it raises ValueError or NotImplementedError on any, every rank raises AgreedError."""
        problem, result = None, None
        try:
            result = work()
        except AgreedError:  # all ranks are raising it
            raise
        except (ValueError, NotImplementedError) as error:
            problem = str(error)
        self.agree(problem)
        return result  # type: ignore[return-value]


def control_device(group: dist.ProcessGroup) -> torch.device:
    """The device for small tensors that ranks compare and read at once: the CPU where the group has a backend for it."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


LENT_MOST = 4
"""Lent groups of a mesh from which on garbage is collected, to find idle ones, before another is made."""
BROADCAST_BYTES = 2**28
"""Largest message that packs several tensors, in bytes; torch's DDP uses the same size."""


def join(
    world: World,
    plan: Plan,
    *,
    timeout_seconds: float | None = None,
    device: torch.device | None = None,
    control_backend: str | None = "gloo",
) -> Mesh:
    """Initialize torch.distributed and make the process groups of `plan`; every rank calls it.  `leave` undoes it.

    On a GPU, backward passes run in the calling thread from then on; ranks of a CPU divide its cores (cores_of_ranks.py).
    A default process group that exists already is used as it is.  On a single rank nothing is initialized.
    device: what this rank computes on; by default its GPU, or the CPU where its machine has none.
    timeout_seconds: of the rendezvous and of messages; None: `rendezvous_seconds()`.
    control_backend: of the groups whose messages are numbers and checkpoints on the host; None: that of the default group.
    ValueError: the plan does not fit the number of ranks (before any message), the rendezvous address does not resolve, the
        other ranks do not come in time, or do not fit (roll_call.py).
    """
    check(plan, ranks=world.size)
    seconds = rendezvous_seconds() if timeout_seconds is None else timeout_seconds
    if world.size > 1 and not dist.is_initialized():
        world = placed_on_machine(world, timeout=datetime.timedelta(seconds=seconds))
    device = device or device_of(world.rank, world.local_rank)
    if world.size == 1:
        return Mesh(plan, world, device, grid=Grid(tuple(plan.space)))
    opened = not dist.is_initialized()
    backward_in_this_thread(device)
    with process_groups.making_groups():
        if opened:
            _meet(world, device, seconds)
        assert dist.group.WORLD is not None
        cores_of_ranks.divide(device, dist.group.WORLD)
        return replace(_with_groups(plan, world, device, lambda: dist.group.WORLD, control_backend), opened=opened)


def apart(mesh: Mesh) -> Mesh:
    """A mesh of several ranks like this one, all of whose groups are its own.  Every rank calls it, and `leave` ends them."""
    with process_groups.making_groups():
        return replace(_with_groups(mesh.plan, mesh.world, mesh.device, dist.new_group, "gloo"), watch=mesh.watch)


def _with_groups(plan: Plan, world: World, device: torch.device, of_all: Callable[[], Any], control: str | None) -> Mesh:
    """A mesh with new groups.  of_all: gives the group of all ranks.  control: see `control_backend` of join."""
    settle_before_exit()
    before = set(c10d_world.pg_map)
    everyone = of_all()
    devices = process_groups.device_mesh(plan, device, everyone)
    mesh = Mesh(
        plan,
        world,
        device,
        devices,
        group=everyone,
        data_group=process_groups.data_group(plan) if plan.channel * plan.stage > 1 else everyone,
        statistics_group=process_groups.data_group(plan),
        checkpoint_group=process_groups.checkpoint_group(control),
        channel_group=devices.get_group("channel") if plan.channel > 1 else None,
        stage_group=process_groups.line(devices, "stage") if plan.stage > 1 else None,
        copy_group=process_groups.copy_group(plan, device, everyone, control),
        grid=process_groups.grid_of(plan, devices, rank=world.rank),
        shards=process_groups.shards_of(plan, devices, everyone) if plan.shard > 1 else None,
    )
    return replace(mesh, made=tuple(group for group in c10d_world.pg_map if group not in before))


def current_world() -> World | None:
    """This process's rank in the default process group; None where torch.distributed is not initialized."""
    if not dist.is_initialized():
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count() or size)
    local_rank = int(os.environ.get("LOCAL_RANK") or rank % local_size)
    return World(rank, size, local_rank, local_size, launcher="process group")


def leave(mesh: Mesh) -> None:
    """Destroy what `join` made: the default process group, or only the mesh's own groups where the default one was there."""
    if not dist.is_initialized():
        return
    if mesh.shards is not None:
        from widefield.private_torch.dtensor import clear_sharding_prop_cache

        clear_sharding_prop_cache()  # it caches DeviceMeshes, and DTensors on the next equal mesh would get this one
    if mesh.opened:
        dist.destroy_process_group()
        cores_of_ranks.undo()
        return
    for group in (*mesh.made, *mesh.further, *(group for group, _ in mesh.lent)):
        if group in c10d_world.pg_map:
            dist.destroy_process_group(group)


def _meet(world: World, device: torch.device, timeout_seconds: float) -> None:
    timeout, backend = datetime.timedelta(seconds=timeout_seconds), backend_for(device)
    try:
        dist.init_process_group(
            backend=backend,
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            store=store_of_meeting(world, timeout=timeout, gpu=gpu_of(device) if "nccl" in backend else None),
            device_id=device if "nccl" in backend else None,
        )
    except dist.DistError as error:
        raise ValueError(
            f"rank {world.rank} of {world.size} did not meet the others at {world.place} within {timeout_seconds:.0f} s "
            f"({error}); see that all ranks were started and that the port is open between their machines"
        ) from None
