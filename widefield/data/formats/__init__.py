"""Dataset formats, one per file: `open_dataset(config, **options) -> Dataset`, and CASES.  options: data.options."""
