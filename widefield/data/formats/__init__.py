"""A dataset format per file: `open_dataset(config, **options) -> Dataset`, and CASES; `options` are `data.options`."""
