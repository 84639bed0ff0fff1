"""What is the model trained for?  The section `task` of a recipe."""

from __future__ import annotations

from widefield.config.field_types import Options
from widefield.section import Section


class TaskConfig(Section):
    name: str = "classification"
    """A file in widefield/tasks/."""
    options: Options = {}
    """Arguments of the task: for classification `label_smoothing: 0.1`, for segmentation `ignore_index: 255`."""
