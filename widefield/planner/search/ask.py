"""From what a user asks to an answer: the recipe or the model's name, the images, the machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from widefield.config import RunConfig, parse_config, read_config
from widefield.config.recipe import packaged_recipes
from widefield.data import open_dataset
from widefield.data.loader import reader_of
from widefield.data.order import Key
from widefield.planner.emulation import stand_in_data
from widefield.planner.machines import Cluster, cluster_of
from widefield.planner.machines.own_kernels import OwnKernels, is_here
from widefield.planner.search.answer import PlanAnswer, answer
from widefield.planner.search.backwards import Reply, cheapest, fewest_devices, largest_batch, largest_image
from widefield.planner.search.pricing import Pricing
from widefield.planner.search.search import SECONDS, SearchResult
from widefield.quantity import count_of
from widefield.section import to_yaml
from widefield.training.given import NOTHING, Given

StandInTask = Literal["classification", "segmentation", "restoration"]
SEGMENTS = ("unet", "smp/", "monai/", "torchvision/deeplab", "torchvision/fcn", "torchvision/lraspp")
"""How the names of models begin that answer for every pixel."""
CLASSES = 10


@dataclass(frozen=True)
class PlanRequest:
    """recipe: the path or name of a recipe, a model's name where `image` is given, or a RunConfig.

    image: (C, *pixels) of stand-in images, in place of the recipe's.  classes, batch: of them; None: as the recipe says.
    task: what stand-in images are for; None: what the model is for.
    largest, fewest, dollars_per_hour: further questions; the price is one device's.
    seconds: for the search.  scales: price the best plan on other numbers of devices too.
    kernel_seconds: further ones, for timing the kernels of the plans on this machine, if `cluster` names it and it was
        measured; they are kept in the user's cache with the rest.
    given: objects in place of what the recipe names.
    """

    recipe: str | Path | RunConfig
    cluster: str
    overrides: Sequence[str] = ()
    image: tuple[int, ...] | None = None
    classes: int | None = None
    batch: int | None = None
    task: StandInTask | None = None
    network: str | None = None
    largest: tuple[str, ...] = ()
    fewest: bool = False
    dollars_per_hour: float | None = None
    seconds: float = SECONDS
    kernel_seconds: float = 0.0
    scales: bool = True
    trust: bool = False
    given: Given = NOTHING


def ask(request: PlanRequest, say: Callable[[str], None] = lambda text: None) -> PlanAnswer:
    """Reply a request.  say: hears of each plan as it is tried.

    ValueError: no such recipe, model, device or image, or no plan gives every rank work.  NotImplementedError: the model cannot
    be emulated, which says what to do instead.
    """
    subject = subject_of(request)
    pricing, image, seconds = subject.pricing, subject.image, request.seconds
    kernels = None
    if request.kernel_seconds > 0 and is_here(pricing.cluster):
        kernels = OwnKernels(pricing.cluster, seconds=request.kernel_seconds)
        pricing, seconds = replace(pricing, measure=kernels.measure), seconds + request.kernel_seconds

    def of_pixels(pixels: tuple[int, ...]) -> Pricing:
        shape, config = (image[0], *pixels), pricing.config
        given = _stand_in(config, shape, subject.classes, subject.task, request.given)
        return Pricing(config, pricing.cluster, given, tally=pricing.tally)

    questions = _questions(request, of_pixels, tuple(image[1:]))
    try:
        return answer(pricing, image, data=subject.data, seconds=seconds, questions=questions, scales=request.scales, say=say)
    finally:
        if kernels is not None:
            kernels.keep()


@dataclass(frozen=True)
class PlanSubject:
    """What a request is about.  image: (C, *pixels).  data: what the images are, in words."""

    pricing: Pricing
    image: tuple[int, ...]
    classes: int
    task: StandInTask
    data: str


def subject_of(request: PlanRequest) -> PlanSubject:
    """ValueError, NotImplementedError: as `ask`; nothing is emulated yet."""
    _check(request)
    cluster, config = cluster_of(request.cluster, network=request.network), config_of_request(request)
    if request.image is not None:
        image, classes = tuple(request.image), request.classes or CLASSES
        task = request.task or _task_of(config)
        given, data = _stand_in(config, image, classes, task, request.given), f"{count_of(classes, 'class', 'classes')}, {task}"
    else:
        image, classes, task = image_of(config, request.given)
        given, data = request.given, config.data.name
    return PlanSubject(Pricing(on_device(config, cluster, dims=len(image) - 1), cluster, given), image, classes, task, data)


def _check(request: PlanRequest) -> None:
    """ValueError: an image without sides, counts below 1, a question that there is not."""
    if request.image is not None and len(request.image) not in (3, 4):
        raise ValueError(
            f"--image has {count_of(len(request.image), 'number')}; write channels and the pixels of each side, as "
            "3x8192x8192, or 1x512x512x512 for volumes"
        )
    if request.image is None and (request.classes or request.task):
        raise ValueError("--classes and --task are about stand-in images; give --image with them, as --image 3x224x224")
    for name, value in (("--batch", request.batch), ("--classes", request.classes)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; write 1 or more")
    odd = [one for one in request.largest if one not in ("image", "batch")]
    if odd:
        raise ValueError(f"--largest {odd[0]} is no question; ask for the largest image or batch")
    if request.dollars_per_hour is not None and not request.dollars_per_hour > 0:
        raise ValueError(f"--price is {request.dollars_per_hour:g}; write the dollars per hour of one device, above 0")


def config_of_request(request: PlanRequest) -> RunConfig:
    """The recipe, with the batch that is asked for; a model's name with --image is a recipe with nothing else said.

    ValueError: no such recipe or key; a batch that is yet to be found.
    """
    overrides = [*request.overrides, *([f"data.batch_size={request.batch}"] if request.batch is not None else [])]
    recipe = request.recipe
    if isinstance(recipe, RunConfig):
        config = parse_config(to_yaml(recipe), overrides, name="the config") if overrides else recipe
    elif request.image is None or Path(recipe).is_file() or str(recipe) in packaged_recipes():
        config = read_config(recipe, overrides, trust=request.trust)
    else:
        task = request.task or ("segmentation" if str(recipe).lower().startswith(SEGMENTS) else "classification")
        text = f"model: {{name: '{recipe}'}}\ndata: {{name: digits}}\ntask: {{name: {task}}}\n"
        config = parse_config(text, overrides, name=f"model {recipe}")
    if config.data.batch_if_known is None:
        raise ValueError("data.batch_size=auto has no plan before it is found; set --batch to a number")
    return config


def on_device(config: RunConfig, cluster: Cluster, *, dims: int) -> RunConfig:
    """The config with the precision and the memory format that a run on these devices would choose where it says null.

    dims: of an image's pixels.
    """
    device, precision, model = cluster.device, config.precision, config.model
    if precision is None:
        low = next((name for name in ("bfloat16", "float16") if name in device.flops_per_second), "float32")
        precision = "float32" if device.is_cpu else low
    if model.channels_last is None and not device.is_cpu and dims == 2 and precision in ("bfloat16", "float16"):
        model = model.model_copy(update={"channels_last": True})
    return config.model_copy(update={"precision": precision, "model": model})


def _refuse_boxes(config: RunConfig) -> None:
    """NotImplementedError: the task matches boxes, of which an emulated step has none."""
    if config.task.name == "detection":
        raise NotImplementedError(
            "task.name=detection matches anchors with boxes, and what that takes depends on the boxes, which an emulated step "
            "has not; write the mesh yourself, and plan with the model's backbone and task.name=classification for its memory"
        )


def _task_of(config: RunConfig) -> StandInTask:
    _refuse_boxes(config)
    if config.task.name == "restoration" or (config.task.name == "gan" and config.task.options.get("noise") is None):
        return "restoration"
    return "segmentation" if config.task.name == "segmentation" else "classification"


def _stand_in(config: RunConfig, image: tuple[int, ...], classes: int, task: StandInTask, given: Given) -> Given:
    scale = config.task.options.get("scale", 1) if task == "restoration" else 1
    found = stand_in_data(image=image, classes=classes, task=task, scale=scale)
    return replace(given, data=found.data)


def image_of(config: RunConfig, given: Given) -> tuple[tuple[int, ...], int, StandInTask]:
    """((C, *pixels) of a training image as a model gets it, number of classes, whether pixels have labels).

    ValueError: the data cannot be opened or read.
    """
    _refuse_boxes(config)
    dataset = open_dataset(config.data) if given.data is None else given.data()
    task: StandInTask = "segmentation" if dataset.pixels else "classification"
    task = "restoration" if dataset.labels == "image" else task
    if config.data.patches is not None:
        return (dataset.channels, *config.data.patches.size), len(dataset.classes), task
    reader = reader_of(
        config.data, dataset.train, num_classes=len(dataset.classes), seed=config.seed, train=True,
        device=torch.device("cpu"), intensity=dataset.intensity, pixels=dataset.pixels, moves_as_one=dataset.moves_as_one,
        dims=dataset.dims, image_scale=dataset.image_scale,
    )  # fmt: skip
    batch = reader.__getitems__([Key(0, 0, 0, real=False)])
    if batch.problem is not None:
        raise ValueError(batch.problem)
    return tuple(batch.image.shape[1:]), len(dataset.classes), task


def _questions(
    request: PlanRequest, of_pixels: Callable[[tuple[int, ...]], Pricing], pixels: tuple[int, ...]
) -> list[Callable[[Pricing, SearchResult], Reply]]:
    found: list[Callable[[Pricing, SearchResult], Reply]] = []
    if "image" in request.largest:
        found.append(lambda _, tried: largest_image(of_pixels, pixels, tried))
    if "batch" in request.largest:
        found.append(largest_batch)
    if request.fewest:
        found.append(lambda pricing, _: fewest_devices(pricing, pixels))
    price = request.dollars_per_hour
    if price is not None:
        found.append(lambda pricing, _: cheapest(pricing, pixels, price))
    return found


TASKS: tuple[str, ...] = get_args(StandInTask)
