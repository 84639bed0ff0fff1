"""The section `task` of a recipe: loss and metrics."""

from __future__ import annotations

from widefield.config.field_types import Listed, Options
from widefield.section import Section


class TaskConfig(Section):
    name: str = "classification"
    """A file in widefield/tasks/, or `package.module:callable`."""
    options: Options = {}
    """Arguments of the task: for classification `label_smoothing: 0.1`, for segmentation `ignore_index: 255`."""
    metrics: Listed = []
    """Metrics besides the task's own, each with its arguments: from torchmetrics.classification and torchmetrics.segmentation
    by name, as `[MulticlassF1Score: {average: macro}]`, or `package.module:callable`."""
