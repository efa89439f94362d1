"""Programs of their own: of one process with eight devices, and of two processes, which exchange arrays over gloo."""

import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback

import jax

ROOT = pathlib.Path(__file__).parents[2]


def found_in(module, *args):
    """What ``python -m MODULE ARGS...`` finds on eight devices: `report`'s object."""
    # On a busy machine a device may wait longer for the others than the 40 seconds after which XLA gives up.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # as the fixture quick_compile
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, args)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def report(run, names):
    """In such a process: run the checks and print as JSON, by the name of each, the text of its exception, or null."""
    assert jax.device_count() == 8, "eight devices: XLA_FLAGS=--xla_force_host_platform_device_count=8"
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", True)
    outcomes = {}
    for name in names:
        try:
            run(name)
            outcomes[name] = None
        except (Exception, SystemExit):
            outcomes[name] = traceback.format_exc(limit=-6)[-3000:]
    print(json.dumps(outcomes))


@contextlib.contextmanager
def refused(pattern, kind=ValueError):
    """The block must raise an error whose message has the pattern."""
    try:
        yield
    except kind as error:
        assert re.search(pattern, str(error)), str(error)
    else:
        raise AssertionError(f"not refused: {pattern}")


def mesh_of(text, kind):
    """A mesh as it is written, for example ``data=2 slots=4``."""
    names, sizes = zip(*re.findall(r"(\w+)=(\d+)", text), strict=True)
    return jax.make_mesh(tuple(map(int, sizes)), names, axis_types=(kind,) * len(names))


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
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
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
        texts = [file.read().decode()[-3000:] for file in files]
    assert codes == [0, 0], "\n".join(texts)


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
