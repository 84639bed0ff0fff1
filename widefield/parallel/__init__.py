"""A model over a mesh: `parallelize`, one file per strategy in strategies/, and what a training loop does with such a model."""
