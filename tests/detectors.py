"""Settings of the recipe of detection for each method, at a size of tests: see small_recipe.py."""

SMALL = [
    "data.options.size=[77, 91]", "data.options.pages=[6, 5]", "data.workers=0", "data.batch_size=2", "precision=float64",
    "data.evaluate_batch_size=2", "data.options.digits_per_megapixel=250",
]  # fmt: skip
"""Pages of odd sizes, some without a digit."""
SSD = [
    "task.options={method: ssd, strides: [8, 16], score: 0.02, scales: [0.1, 0.3, 0.5], candidates: 40}", "model.name=ssd",
    "model.options={backbone: small, strides: [8, 16], width: 8, features: 32, boxes: [6, 6]}",
]  # fmt: skip
FASTER_RCNN = [
    "task.options={method: faster_rcnn, strides: [8, 16], features: 32, anchor_scale: 2, ratios: [1], octaves: 3, score: 0.02, "
    "proposals: [200, 100], anchors_drawn: 64, boxes_drawn: 48}", "model.name=faster_rcnn",
    "model.options={backbone: small, strides: [8, 16], anchors: 3, width: 8, features: 32, hidden: 32}",
]  # fmt: skip
