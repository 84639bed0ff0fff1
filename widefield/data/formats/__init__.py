"""Dataset formats, one per file: `open_dataset(config, **options) -> Dataset`, and CASES; where it imports what takes
long, also LOADS, their names.  options: data.options."""
