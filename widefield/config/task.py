"""The section `task` of a recipe: loss and metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from widefield.config.field_types import Listed, Options
from widefield.section import Section

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TaskConfig(Section):
    name: str = "classification"
    """A file in widefield/tasks/ (`classification`, `multilabel`, `regression`, `segmentation`, `multilabel_segmentation`,
    `restoration`, `gan`, `detection`, `self_supervised`), or `package.module:callable`."""
    options: Options = {}
    """Arguments of the task: for classification `label_smoothing: 0.1`, for segmentation `ignore_index: 255`, for restoration
    `scale: 2`, for gan `noise: 100`."""
    loss: str | None = None
    """A file in widefield/losses/ (`focal`, `dice`, `dice_cross_entropy`, `huber`, `ssim`, ...), or
    `package.module:callable`, also a class, as `torch.nn:MultiMarginLoss`; the task's own where null."""
    loss_options: Options = {}
    """Arguments of the loss: for focal `gamma: 2`, for dice `batch: true`."""
    class_weights: Literal["balanced"] | list[Weight] | dict[str, Weight] | None = None
    """A weight of each class in the loss: a list, or by name, where classes left out have 1; `balanced`: in inverse proportion
    to the class's samples or pixels in the training split."""
    metrics: Listed = []
    """Metrics besides the task's own, each with its arguments: `[f1, auc, dice_cases, {hd95: {spacing: [0.5, 0.5]}}]`, from
    torchmetrics.classification and torchmetrics.segmentation by name, as `[MulticlassF1Score: {average: macro}]`, or
    `package.module:callable`."""
