"""Files of labels and probabilities, one per format that can be written, with the name that the format has in formats/.

Each has LABEL_SUFFIX and `write_labels(path, labels: LabelImage, read: ReadLabels)`, and BAND_SUFFIX and `write_bands(path,
bands: BandImage, read: ReadBand)`.  They read boxes and write blocks, so that no image is ever in memory as a whole.  One
process writes a file, and nobody sees it before it is whole.
"""
