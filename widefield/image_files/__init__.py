"""Files of images of any size, read by window: any box of pixels of any level, without the rest.

`open_image(path)` finds the format, which is a file in formats/, and returns an `ImageFile`.  This room knows NumPy and the
geometry of intervals alone, so that whatever trains, predicts or shows can stand on it.
"""

from widefield.image_files.image_file import ImageFile as ImageFile
from widefield.image_files.info import ImageInfo as ImageInfo
from widefield.image_files.info import Level as Level
from widefield.image_files.opened import opened_image as opened_image
from widefield.image_files.opening import is_image_file as is_image_file
from widefield.image_files.opening import is_series as is_series
from widefield.image_files.opening import open_image as open_image
from widefield.image_files.opening import stem_of as stem_of
