"""What a run with a parameter server refuses, before the first message and on every rank."""

from __future__ import annotations

import os

from torch import nn

from widefield.comm.mesh import AgreedError, Mesh
from widefield.comm.roll_call import machine
from widefield.config import GuardConfig, RunConfig
from widefield.plans import Plan
from widefield.private_torch.modules import BatchNorm
from widefield.tasks import Task
from widefield.training.given import NOTHING, Given
from widefield.training.turns import members_named


def check_recipe(config: RunConfig, given: Given = NOTHING) -> None:
    """ValueError: what the recipe asks for is for ranks that step together."""
    if config.agreement.has_server:
        name = f"agreement={config.agreement.name}"
        problems = (_of_data, _of_steps, _of_guard, _of_hogwild)
        for problem in (*(find(config, name) for find in problems), _of_objects(given, name)):
            if problem is not None:
                raise ValueError(problem)


def _of_data(config: RunConfig, name: str) -> str | None:
    data = config.data
    if data.batch_if_known is None:
        return f"data.batch_size={data.batch_size} is found by steps of all ranks, which {name} has none of; set a number"
    if data.workers:
        return (
            f"data.workers={data.workers} read ahead and under {name} a worker learns what to read when it has the weights; "
            "leave data.workers out, and start more ranks where reading is slow"
        )
    if data.bad_images == "skip":
        return f"data.bad_images=skip counts images over all ranks and {name} does not; set data.bad_images=stop"
    return None


def _of_steps(config: RunConfig, name: str) -> str | None:
    if config.precision == "float16":
        return (
            f"precision=float16 leaves out steps whose gradients overflow, and under {name} each worker would leave out its "
            "own; set precision=bfloat16 or float32"
        )
    if config.optimizer.lr == "find":
        return (
            f"optimizer.lr=find tries rates with steps of all ranks; find the rate with agreement=mean, and set it for {name}"
        )
    if config.ema is not None:
        return f"ema averages weights after whole steps and {name} makes smaller updates; leave ema out"
    if config.model.unfreeze:
        return (
            f"model.unfreeze={config.model.unfreeze} changes between steps what learns and under {name} workers are in "
            "several steps at once; leave it out (model.freeze stays)"
        )
    if config.log.timeline:
        return f"log.timeline draws what each rank does in a step of all, which {name} has none of; leave it out"
    if os.environ.get("WIDEFIELD_FAULTS"):
        return (
            f"WIDEFIELD_FAULTS plants faults in steps of all ranks, which {name} has none of; unset it, and kill a rank by "
            "hand to see what happens"
        )
    if config.mesh.auto or config.log.predict:
        return f"mesh.auto and log.predict plan steps that all ranks make together, which {name} has none of; leave them out"
    return None


def _of_guard(config: RunConfig, name: str) -> str | None:
    changed = [
        f"guard.{one}={getattr(config.guard, one)}"
        for one in ("non_finite", "spike", "checksum_every")
        if getattr(config.guard, one) != GuardConfig.model_fields[one].default
    ]
    if changed:
        return (
            f"{', '.join(changed)} judges steps of all ranks; under {name} the run stops at a gradient that is NaN or "
            "infinite, and there is nothing else; leave it out"
        )
    return None


def _of_hogwild(config: RunConfig, name: str) -> str | None:
    """Workers change shared weights by themselves, so that nothing may be kept from one update to the next."""
    optimizer = config.optimizer
    if config.agreement.kind != "hogwild":
        return None
    instead = "or set agreement.kind=asynchronous, whose server keeps it"
    if optimizer.name != "sgd":
        return (
            f"optimizer.name={optimizer.name} keeps something of earlier gradients and {name} with kind=hogwild has nobody who "
            f"would: workers subtract from shared weights; set optimizer.name=sgd and optimizer.momentum=0, {instead}"
        )
    momentum = optimizer.options.get("momentum", optimizer.momentum)
    if momentum or optimizer.nesterov:
        also = " and optimizer.nesterov=true" if optimizer.nesterov else ""
        return (
            f"optimizer.momentum={momentum}{also} keeps a mean of earlier gradients and {name} with kind=hogwild has nobody "
            f"who would: workers subtract from shared weights; set optimizer.momentum=0 and leave nesterov out, {instead}"
        )
    if not hasattr(os, "memfd_create"):
        return (
            f"{name} with kind=hogwild needs memory of the kernel that ranks share, by memfd_create, and this system has none; "
            "run it on Linux, or set agreement.kind=asynchronous"
        )
    return None


def check_machines(plan: Plan, mesh: Mesh) -> None:
    """AgreedError: workers and server of Hogwild share memory, and not all ranks are on one machine.  Every rank calls it."""
    if plan.agreement.kind != "hogwild":
        return
    ranks = dict[str, list[int]]()
    for rank, where in enumerate(mesh.gather_objects(machine())):
        ranks.setdefault(where, []).append(rank)
    if len(ranks) > 1:
        each = "; ".join(f"{', '.join(map(str, those))} on {where.split()[0]}" for where, those in ranks.items())
        raise AgreedError(
            f"agreement.kind=hogwild has all ranks change weights in one machine's memory, and the {mesh.size} ranks are on "
            f"{len(ranks)} machines (or containers): ranks {each}. Start all of them on one, or set agreement.kind=asynchronous"
        )


def _of_objects(given: Given, name: str) -> str | None:
    if given != NOTHING:
        return (
            f"objects passed in place of names in a recipe are not carried by {name}; name what makes them, as "
            "model.name=package.module:callable"
        )
    return None


def server_in_words(plan: Plan) -> str:
    """What a user should know of such a run."""
    asked = plan.agreement
    if asked.name == "ad_psgd":
        return (
            f"agreement=ad_psgd: {plan.workers} workers train by themselves and average in pairs, each before a step of its "
            f"own; rank {plan.workers} keeps the account of samples, evaluates and saves their mean; these are not one "
            "device's numbers"
        )
    if asked.kind == "hogwild":
        return (
            f"agreement=server, hogwild: {plan.workers} workers read and change weights in memory that they share with "
            f"rank {plan.workers}, without locks; it hands out samples, evaluates and saves; these are not one device's numbers"
        )
    options = [f"{name} {getattr(asked, name)}" for name in ("bound", "max_staleness", "compensation", "compression")
               if getattr(asked, name) is not None]  # fmt: skip
    options += [f"{asked.backup} backup workers"] * bool(asked.backup)
    options += ["overlap"] * asked.overlap
    exact = asked.kind == "synchronous" and not asked.backup and asked.compression is None
    numbers = "data-parallel training" if exact else "not one device's numbers"
    last = plan.workers + asked.servers - 1
    holds = f"rank {last} holds the weights, evaluates and saves"
    if asked.servers > 1:
        holds = f"ranks {plan.workers} to {last} hold a part of the weights each, rank {plan.workers} evaluates and saves"
    return (
        f"agreement=server, {', '.join([asked.kind, *options])}: {holds}, and {plan.workers} workers push gradients; these are "
        f"{numbers}"
    )


def check_parts(model: nn.Module, task: Task, name: str) -> None:
    """NotImplementedError: a model or task whose updates workers of the agreement `name` cannot make."""
    if members_named(task):
        raise NotImplementedError(
            f"the task has modules that learn by turns, {', '.join(members_named(task))}, each from what the one before has "
            f"become, and {name} has one gradient per pass; set agreement=mean"
        )
    if getattr(task, "finish", None) is not None:
        raise NotImplementedError(
            f"the loss is finished from the sums of a whole batch, of which a worker of {name} has a part; set "
            "agreement=mean, or a loss that is a sum over samples or pixels"
        )
    synced = [path for path, one in model.named_modules() if isinstance(one, nn.SyncBatchNorm)]
    if synced:
        raise NotImplementedError(
            f"{synced[0]} is a SyncBatchNorm, which waits for the statistics of all ranks, and workers of {name} do not "
            "wait for each other; make it a BatchNorm"
        )
    names = [path for path, one in model.named_modules() if isinstance(one, BatchNorm) and one.momentum is None]
    if names:
        raise NotImplementedError(
            f"{names[0]} has momentum=None, the mean over all batches, which the order of updates would change; set its "
            "momentum, as 0.1"
        )
    dtypes = {one.dtype for one in (*model.parameters(), *model.buffers()) if one.is_floating_point()}
    complex_ones = [path for path, one in model.named_parameters() if not one.is_floating_point()]
    if len(dtypes) > 1 or complex_ones:
        found = ", ".join(sorted(map(str, dtypes))) + (f" and {complex_ones[0]} of none" if complex_ones else "")
        raise NotImplementedError(
            f"the model's weights and statistics are of {found}, and {name} sends them as one tensor of one floating dtype; "
            "give the model one, and let precision choose the arithmetic"
        )
