"""Which machine calls choose for: what the devices say, what a context says, and the switch to plain JAX."""

import dataclasses
import logging
import threading

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, Operation, default_implementation, set_default_implementation
from pallas_kernels.machine import Machine, assume_machine, current_machine, say_once

OPERATION = Operation(
    "op", {"kernel": Implementation(lambda x: x + 1, ("gpu", "cpu")), "xla": Implementation(lambda x: x + 2)}
)


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as JAX shows it."""

    compute_capability: str


@dataclasses.dataclass(frozen=True)
class Other:
    """A device that has no compute capability."""


@pytest.fixture
def gpus(monkeypatch):
    """Makes this process one of the given GPUs."""

    def pretend(*devices):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "local_devices", lambda: list(devices))

    say_once.cache_clear()
    yield pretend
    say_once.cache_clear()


@pytest.mark.parametrize(
    ("devices", "capability", "chosen", "shared"),
    [
        ([Device("7.5")], (7, 5), "xla", None),
        ([Device("8.0")], (8, 0), "kernel", 163),
        ([Device("8.9")], (8, 9), "kernel", 99),
        ([Device("9.0"), Device("9.0")], (9, 0), "kernel", 227),
        ([Device("9.0a")], (9, 0), "kernel", 227),
        ([Device("12.1")], (12, 1), "kernel", 99),  # not in the table: what every card has
        ([Device("10.0"), Device("7.0")], (7, 0), "xla", None),  # the least capable counts
        ([Device("gfx942")], None, "xla", None),  # ROCm
        ([Other()], None, "xla", None),
    ],
)
def test_kernels_run_on_ampere_and_above_and_elsewhere_one_line_says_so(gpus, caplog, devices, capability, chosen, shared):
    gpus(*devices)
    assert current_machine() == Machine("gpu", capability)
    with caplog.at_level(logging.WARNING):
        assert [OPERATION.resolve(1.0) for _ in range(3)] == [chosen] * 3
    if chosen == "kernel":
        assert not caplog.records and current_machine().shared_memory == shared * 1024
        return
    (record,) = caplog.records
    assert record.message == (
        "all operations run as plain JAX (implementation 'xla'): kernels need an NVIDIA GPU of compute capability 8.0 or "
        f"above, got {current_machine()}"
    )
    with pytest.raises(NotImplementedError, match=r"op: 'kernel' cannot run: needs an NVIDIA GPU .* 8.0 or above, got a"):
        OPERATION.run(1.0, implementation="kernel")


def test_a_tpu_says_what_has_no_kernel_and_a_cpu_says_nothing(caplog):
    say_once.cache_clear()
    only_gpu = Operation("op", {"kernel": Implementation(abs, ("gpu",)), "xla": Implementation(abs)})
    with caplog.at_level(logging.WARNING):
        with assume_machine("cpu"):
            assert only_gpu.resolve(1.0) == "xla" and not caplog.records
        with assume_machine("tpu"):
            assert only_gpu.resolve(1.0) == "xla"
    told = ["operations without a kernel for TPUs run as plain JAX (implementation 'xla')"]
    assert [record.message for record in caplog.records] == told


def test_programs_are_compiled_anew_for_another_switch_or_machine():
    """A user's own ``jit`` too, whose trace JAX keeps; nested, in another thread, and set for the whole process."""
    traced = []

    @jax.jit
    def program(x):
        traced.append(1)
        return OPERATION.run(x)

    def in_a_thread():
        got = []
        thread = threading.Thread(target=lambda: got.append(float(program(jnp.zeros(())))))
        thread.start()
        thread.join()
        return got[0]

    zero = jnp.zeros(())
    with assume_machine("cpu"):
        assert program(zero) == 1
        with default_implementation("xla"):
            assert program(zero) == 2
            with default_implementation(None):
                assert program(zero) == 1
            assert OPERATION.run(zero, implementation="kernel") == 1, "what is named goes before the default"
            assert OPERATION.resolve(zero) == "xla"
        assert program(zero) == 1 and len(traced) == 2, "both programs are kept"
        with assume_machine("gpu", (7, 5)):
            assert program(zero) == 2
        assert len(traced) == 3
    try:
        set_default_implementation("xla")
        assert program(zero) == 2 and in_a_thread() == 2
        with default_implementation(None):
            assert dispatch.get_default_implementation() is None
        assert dispatch.get_default_implementation() == "xla"
    finally:
        set_default_implementation(None)
    assert dispatch.get_default_implementation() is None and OPERATION.resolve(zero) in OPERATION.implementations


@pytest.mark.parametrize("switch", [set_default_implementation, lambda name: default_implementation(name).__enter__()])
def test_a_default_that_not_every_operation_has_is_refused(switch):
    with pytest.raises(ValueError, match="default implementation: got 'cudnn', expected 'xla' or None"):
        switch("cudnn")
