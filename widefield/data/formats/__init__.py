"""Dataset formats, one per file: `open_dataset(config, **options) -> Dataset`, and CASES.  options: data.options.

A file whose imports take long has `load_libraries()` too: ranks are forked from a process that has called it.
"""
