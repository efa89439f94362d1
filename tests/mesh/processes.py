"""Programs of two processes on this machine, which exchange arrays over gloo."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import traceback

import jax

ROOT = pathlib.Path(__file__).parents[2]


def run_two(module, *args, devices):
    """``python -m MODULE NUMBER PORT ARGS...`` as processes 0 and 1, with so many devices each; both must succeed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_collective_call_terminate_timeout_seconds=600"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryFile() as first, tempfile.TemporaryFile() as second:
        files = first, second  # and no pipes: the first process must not wait until the second one's text has been read
        running = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(number), str(port), *map(str, args)],
                cwd=ROOT, env=environment, stdout=file, stderr=file,
            )  # fmt: skip
            for number, file in enumerate(files)
        ]
        try:
            end = time.monotonic() + 900
            while time.monotonic() < end and None in (codes := [process.poll() for process in running]) and not any(codes):
                time.sleep(0.1)  # until both have ended, or one has failed, for which the other would wait
        finally:
            for process in running:
                process.kill()
        for file in files:
            file.seek(0)
        told = [file.read().decode()[-3000:] for file in files]
    assert codes == [0, 0], "\n".join(told)


@contextlib.contextmanager
def one_of_two(number, port):
    """Makes this process one of the two. It ends at once if the block raises; else both would wait for each other."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=number)
    try:
        yield
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    jax.distributed.shutdown()
