"""Are the boxes of a prediction what COCO's evaluation reads, with the data set's own numbers?"""

from __future__ import annotations

import json

from widefield.prediction.boxes import write_coco_results


def test_boxes_have_the_ids_of_images_and_categories(tmp_path):
    found = {"boxes": [[1.0, 2.0, 4.0, 8.0], [0.0, 0.0, 1.0, 1.0]], "classes": ["dog", "cat"], "probabilities": [0.9, 0.5]}
    done = [{"name": "val/000000000139", "answer": found}, {"name": "scan", "answer": {"classes": [], "probabilities": []}}]
    rows = json.loads(write_coco_results(tmp_path, done, {"cat": 17, "dog": 18}).read_text())
    assert rows == [
        {"image_id": 139, "category_id": 18, "category_name": "dog", "bbox": [1.0, 2.0, 3.0, 6.0], "score": 0.9},
        {"image_id": 139, "category_id": 17, "category_name": "cat", "bbox": [0.0, 0.0, 1.0, 1.0], "score": 0.5},
    ]
