"""``python -m experiments.cli``, which is the command ``kvjax``."""

from __future__ import annotations

import sys

from experiments.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
