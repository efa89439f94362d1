"""The rules of dispatch."""

from __future__ import annotations

import pytest

from pallas_kernels.dispatch import Implementation, Operation


def test_dispatch_goes_on_and_reports_every_failure():
    def cannot(x):
        raise NotImplementedError(f"got {x}, expected 0")

    def broken(x):
        raise ValueError("a bug is not a reason to go on")

    falls_through = Operation("op", {"a": Implementation(cannot), "xla": Implementation(lambda x: x + 1)})
    assert falls_through.run(1) == 2
    with pytest.raises(NotImplementedError, match="op: 'a' cannot run: got 1, expected 0"):
        falls_through.run(1, implementation="a")
    none = Operation("op", {"a": Implementation(cannot), "b": Implementation(cannot, ("tpu",))})
    with pytest.raises(ExceptionGroup, match="op: no implementation can run on platform='cpu'") as caught:
        none.run(1, platform="cpu")
    assert len(caught.value.exceptions) == 2
    with pytest.raises(ValueError, match="a bug"):
        Operation("op", {"a": Implementation(broken), "xla": Implementation(cannot)}).run(1)
