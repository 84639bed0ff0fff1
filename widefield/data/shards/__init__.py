"""Samples in tars, in WebDataset's convention: consecutive members that share a stem, as `007.jpg` and `007.cls`.

A shard is one such tar.  A member's key is its path to the first dot of its name, its extension is the rest: `a/007.mask.png`
has the key `a/007` and the extension `mask.png`.  A sample is all members of one key.
`patterns.py` says which files are meant, `tar_members.py` reads the headers of one, `index.py` makes samples of them and
`index_files.py` keeps what was found; `open_shards.py` reads a member's bytes, and `columns.py`, `labels.py`, `classes.py` and
`images.py` make a dataset of them.
"""
