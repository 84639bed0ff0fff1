"""A page that shows images of any size with their labels, from a folder on disk: no server, no network, nothing to install.

sources.py finds files, those of a folder of predictions too, and scenes.py opens them; reading.py reads them by window;
display.py has pixels as bytes, and label_numbers.py labels; layers.py has what a tile shows, and pyramid.py makes it smaller;
tally.py counts; scene_writer.py writes tiles of an image by tile_files.py, its picture by overview.py; estimate.py says what
all will cost; folder.py writes it.  index.html, viewer.css, tiles.js, viewer.js and controls.js are the page.

A tile is TILE x TILE pixels of a level; a pixel of level k covers 2 ** k x 2 ** k pixels of the file.  A slice is a plane of a
volume: plane 0 is cut at one depth, plane 1 at one row and plane 2 at one column.  An image that is no volume has one slice.
"""

from widefield.viewer.folder import Viewer as Viewer
from widefield.viewer.scenes import Scene as Scene
from widefield.viewer.scenes import open_scene as open_scene
from widefield.viewer.settings import Settings as Settings
