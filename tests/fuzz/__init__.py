"""Random programs under random plans against one device.  `python -m tests.fuzz --seed 7 --minutes 10` says what differs."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])
if TESTS not in sys.path:  # where the modules that tests share are found, as pytest finds them
    sys.path.append(TESTS)
