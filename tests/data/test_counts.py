"""Is every label counted once, whatever the kind of labels?"""

import pytest
import torch

from widefield.data.counts import label_counts


@pytest.mark.parametrize(
    ("labels", "target", "counts"),
    [
        ("class", 3, {3: 1}),
        ("class", torch.tensor(3), {3: 1}),
        ("classes", torch.tensor([1, 0, 1], dtype=torch.uint8), {0: 1, 1: 0, 2: 1}),
        ("values", torch.tensor([0.5, 2.0]), {}),
        ("pixels", torch.tensor([[0, 255], [2, 2]], dtype=torch.uint8), {0: 1, 2: 2, 255: 1}),
        ("pixels", torch.tensor([[-1, 300], [300, 1]]), {-1: 1, 1: 1, 300: 2}),
        ("pixels", torch.tensor([[7, 1 << 40]]), {7: 1, 1 << 40: 1}),
        ("layers", torch.tensor([[[1, 1], [0, 1]], [[0, 0], [0, 0]]], dtype=torch.uint8), {0: 3, 1: 0}),
    ],
)
def test_labels_of_every_kind_are_counted(labels, target, counts):
    assert label_counts(target, labels) == counts
