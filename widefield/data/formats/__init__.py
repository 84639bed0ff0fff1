"""A dataset format per file: `open_dataset(config) -> Dataset`, and CASES."""
