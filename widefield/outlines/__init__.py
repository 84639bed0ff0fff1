"""Regions of labels as polygons, and polygons as labels; both by window.

tracing.py finds the outlines of labels; filling.py has the labels of a window from polygons; geojson.py writes and reads files
of them; place.py takes pixels to the world and back.  Coordinates are (x, y) in pixels of the whole, from the corner of the
first one: a pixel is the square from (column, row) to (column + 1, row + 1).
"""
