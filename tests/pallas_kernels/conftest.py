"""Settings of all kernel tests: many small programs, so compile them quickly."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def compile_quickly(quick_compile):
    """Every kernel test compiles small programs that run once or twice."""
