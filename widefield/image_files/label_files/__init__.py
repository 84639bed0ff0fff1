"""Files of labels, one per format that can be written, with the name that the format has in formats/.

Each has LABEL_SUFFIX, and `write_labels(path, labels: LabelImage, read: ReadLabels)`, which reads boxes and writes blocks, so
that the labels are never in memory as a whole.  One process writes a file, and nobody sees it before it is whole.
"""
