"""The command ``kvjax``, which is also ``python -m kvjax``; the only file here that knows `experiments`."""

from __future__ import annotations

import sys

from experiments.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
