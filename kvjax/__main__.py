"""`python -m kvjax`."""

from __future__ import annotations

import sys

from kvjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
