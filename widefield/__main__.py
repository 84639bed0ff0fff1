"""`python -m widefield` is the command `widefield`."""

import sys

from widefield.cli import main

if __name__ == "__main__":
    sys.exit(main())
