"""Where what a stream keeps between tiles lies: memory, files, an image's own file.  Imports integers alone."""
