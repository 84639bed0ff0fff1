"""Which plans can have copies of the model that do not step together: replicas between averages of their weights, and the
workers of a parameter server."""

from __future__ import annotations

from widefield.plans.plan import Plan


def check_replicas(plan: Plan) -> None:
    """Refuse a plan whose replicas could not go their own ways.

    ValueError: the user can change it.
    """
    name = f"agreement={plan.agreement.name}"
    if plan.data_strategy != "data":
        raise ValueError(
            f"{name} lets copies train by themselves and mesh.data_strategy={plan.data_strategy} has them in one process; set "
            "mesh.data_strategy=data"
        )
    if plan.batch_norm != "averaged":
        raise ValueError(
            f"under {name} copies take steps of their own, so that none can wait for the statistics of all as "
            f"batch_norm={plan.batch_norm} wants; set batch_norm=averaged: running statistics are averaged with the weights"
        )
    if plan.batch_norm_group > 1:
        raise ValueError(
            f"batch_norm_group={plan.batch_norm_group} shares statistics among copies in every step and {name} lets them "
            "train by themselves; set batch_norm_group=1"
        )
    if plan.compression != "none":
        raise ValueError(
            f"gradient.compression={plan.compression} is about gradients that copies send each other and {name} sends weights; "
            "set gradient.compression=none"
        )
    _check_graph(plan)
    for _, size in plan.agreement.groups:
        if plan.replicate % size:
            raise ValueError(
                f"agreement.groups has groups of {size} copies, into which mesh.replicate={plan.replicate} cannot be divided; "
                f"take a divisor of {plan.replicate}"
            )


def _check_graph(plan: Plan) -> None:
    """ValueError: gossip on a graph that there is not of so many replicas, or on which some never hear of others."""
    asked, replicas = plan.agreement, plan.replicate
    if asked.graph == "hypercube" and replicas & (replicas - 1):
        raise ValueError(
            f"agreement.graph=hypercube is of a power of two of copies and mesh.replicate={replicas}; take exponential"
        )
    strangers = [pair for pair in asked.edges if not all(0 <= one < replicas for one in pair)]
    if strangers:
        raise ValueError(f"agreement.edges has {strangers[0]} and copies are 0 to {replicas - 1}, as mesh.replicate={replicas}")
    for start in range(replicas) if asked.edges else ():
        reached, to_do = {start}, [start]
        while to_do:
            one = to_do.pop()
            further = [hearer for sender, hearer in asked.edges if sender == one and hearer not in reached]
            reached.update(further)
            to_do += further
        if len(reached) < replicas:
            lost = min(set(range(replicas)) - reached)
            raise ValueError(
                f"agreement.edges lead from copy {start} to {len(reached)} of {replicas} copies and never to copy {lost}, so "
                "they would not agree; add an edge"
            )


def check_server(plan: Plan) -> None:
    """Refuse a plan that a server and workers of one rank each cannot carry out.

    ValueError: the user can change it.
    """
    _check_workers(plan)
    name = f"agreement={plan.agreement.name}"
    axes = {axis: size for axis, size in plan.axes.items() if size > 1 and axis != "replicate"}
    if axes or plan.stream is not None:
        axis = next(iter(axes), "")
        what = f"mesh.{axis}={plan.space if axis == 'space' else axes[axis]}" if axes else f"stream={plan.stream}"
        raise ValueError(
            f"a worker of {name} is one rank with a whole model and whole images, and {what} was asked for; leave it "
            "out, or take replicas of several ranks: agreement=local_sgd"
        )
    if plan.data_strategy != "data":
        raise ValueError(
            f"{name} has ranks of its own and mesh.data_strategy={plan.data_strategy} has copies in one process; set "
            "mesh.data_strategy=data"
        )
    if plan.batch_norm != "averaged" or plan.batch_norm_group > 1:
        raise ValueError(
            f"workers of {name} cannot wait for each other's statistics as batch_norm={plan.batch_norm} with "
            f"batch_norm_group={plan.batch_norm_group} wants; set batch_norm=averaged and batch_norm_group=1: each gradient "
            "brings the change of the running statistics"
        )
    if plan.accumulate > 1 or plan.compression != "none":
        raise ValueError(
            f"a worker of {name} pushes the gradient of one pass as it is, and gradient.accumulate={plan.accumulate} "
            f"and gradient.compression={plan.compression}; set them to 1 and none, and data.batch_size to what a pass can hold"
        )


def _check_workers(plan: Plan) -> None:
    """ValueError: there are too few."""
    servers, backup = plan.agreement.servers, plan.agreement.backup
    if plan.workers < 1:
        what = "a rank that computes no gradients" if servers == 1 else f"{servers} ranks that hold weights"
        raise ValueError(
            f"agreement={plan.agreement.name} needs {what} and one or more for workers, and mesh.replicate={plan.replicate}; "
            f"set mesh.replicate={servers + 2} for two workers"
        )
    if backup >= plan.workers:
        raise ValueError(
            f"agreement.backup={backup} of {plan.workers} workers leaves none that an update waits for; set backup to "
            f"{plan.workers - 1} or less, or start more ranks"
        )


def check_steps_together(plan: Plan, why: str) -> None:
    """ValueError: copies of the plan step apart, with `why` that cannot be."""
    if plan.has_replicas or plan.has_server:
        raise ValueError(
            f"agreement={plan.agreement.name} lets {plan.replicate} replicas step apart, and {why}; set agreement=mean for that"
        )
