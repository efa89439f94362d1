"""The most memory that operations on caches hold, in a table: ``python -m tests.kvjax.api.test_peaks``, two minutes on a CPU.

Each operation runs in a process of its own, whose resident bytes are read every millisecond. The cache of about 500 MB, of
8 layers, is nearly all room for tokens: so it outweighs what the model computes with.
"""

import functools
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import pytest

import kvjax
from experiments.answering.ask import Shape, ask
from kvjax.api import answer
from models import ModelConfig
from models.weights import random_params

OPERATIONS = {  # caches that must be held at once
    "save_cache": 1, "load_cache": 1, "fork": 2, "fork, 4 copies": 5,
    "save_cache, offloaded": 1, "load_cache, offloaded": 1, "fork, offloaded": 2, "fork, 4 copies, offloaded": 5,
    "save_cache, two devices": 1, "load_cache, two devices": 1, "fork, two devices": 2,
    "answer, 1 question": 1, "answer, 3 questions": 2, "evaluation, 2 texts x 3 questions": 2,
}  # fmt: skip


CONFIG = ModelConfig(
    vocab_size=512, hidden_size=256, intermediate_size=256, num_layers=8, num_q_heads=2, num_kv_heads=2, head_dim=64,
    max_position_embeddings=1 << 20, dtype="float32",
)  # fmt: skip
ROOM = 64 * 1024  # tokens


@pytest.mark.thorough
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the resident bytes of a process are read there")
@pytest.mark.parametrize("name", OPERATIONS)
def test_little_is_held_beside_the_caches(name):
    """At most two arrays of one layer, of eight layers with one or two arrays each, and some MB of programs."""
    held, peak = measured(name)
    assert peak <= 1.25 * held, row(name, held, peak)


def main() -> None:
    if len(sys.argv) > 1:
        print(*_measure(sys.argv[1]))
        return
    print("| operation | caches | MB of these | peak MB | peak / caches |\n|---|---|---|---|---|")
    for name in OPERATIONS:
        print(row(name, *measured(name)), flush=True)


def row(name: str, held: int, peak: int) -> str:
    """A row of the table."""
    return f"| {name} | {OPERATIONS[name]} | {held / 1e6:.0f} | {peak / 1e6:.0f} | {peak / held:.2f} |"


def measured(name: str) -> tuple[int, int]:
    """The bytes of the caches that must be held at once, and the most bytes that were, of one operation in a process."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"} if "two devices" in name else {}
    run = [sys.executable, "-m", "tests.kvjax.api.test_peaks", name]
    done = subprocess.run(run, env={**os.environ, **flags}, check=True, capture_output=True, text=True)
    held, peak = map(int, done.stdout.split()[-2:])
    return held, peak


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _watched() -> Iterator[list[int]]:
    """Append the most resident bytes inside of the block, less those before it, to the list."""
    gc.collect()
    before, most, on = _resident(), [0], [True]

    def watch() -> None:
        while on[0]:
            most[0] = max(most[0], _resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield (grown := [])
    finally:
        on[0] = False
        watcher.join()
        grown.append(most[0] - before)


def _measure(name: str) -> tuple[int, int]:
    sizes: list[int] = []

    def note(cache: kvjax.Cache) -> kvjax.Cache:
        arrays = [x for x in jax.tree.leaves(jax.block_until_ready(cache)) if isinstance(x, jax.Array)]
        sizes[:] = [sum(x.nbytes for x in arrays)]
        return cache

    operation = _answer(int(name.split()[1]), note) if name.startswith("answer") else _operation(name, note)
    with _watched() as grown:
        operation()
    got = 1 if name.startswith(("save", "fork")) else 0  # caches that were there before
    return OPERATIONS[name] * sizes[0], grown[0] + got * sizes[0]


def _operation(name: str, note: Callable) -> Callable[[], object]:
    """An operation that is ready to run; ``note`` is called with its cache."""
    mesh = jax.make_mesh((2,), ("model",)) if "two devices" in name else None
    params = random_params(CONFIG, jax.random.key(0), mesh=mesh)
    if name.startswith("evaluation"):
        shape = Shape(length=128, rows=1, new_tokens=ROOM, questions=3, question_length=32)
        questions, limits = [[[3, 4, 5]] * 3] * 2, [[8] * 3] * 2

        def evaluate() -> None:
            ask(params, CONFIG, [[1, 2, 3] * 20] * 2, "full", shape, questions=questions, limits=limits)

        note(kvjax.prefill(params, [[1] * 128], config=CONFIG, max_new_tokens=shape.room))
        evaluate()  # compiles
        return evaluate
    method = kvjax.make("quest", offload=True) if "offloaded" in name else "full"
    cache = note(kvjax.prefill(params, [[1, 2, 3] * 20], config=CONFIG, method=method, max_new_tokens=ROOM))
    if name.startswith("fork"):
        fork = functools.partial(kvjax.fork, cache, 4 if "4 copies" in name else 1)
        return lambda: jax.block_until_ready(fork())
    path = f"{tempfile.mkdtemp()}/cache"
    if name.startswith("save"):
        save = functools.partial(kvjax.save_cache, path, cache)
        return lambda: (save(), shutil.rmtree(path))
    kvjax.save_cache(path, cache)
    return lambda: (jax.block_until_ready(kvjax.load_cache(path, config=CONFIG, params=params)), shutil.rmtree(path))


def _answer(questions: int, note: Callable) -> Callable[[], object]:
    """`kvjax.answer`, with more room in its cache."""
    model, prefill = kvjax.models.load("builtin"), answer.prefill
    answer.prefill = lambda *args, **options: note(prefill(*args, **{**options, "max_new_tokens": 30_000}))

    def run(count: int = questions) -> None:
        kvjax.answer(model, "The code is 4711. " * 20, ["What is the code?"] * count, max_new_tokens=8)

    run(2)  # compiles
    return run


if __name__ == "__main__":
    main()
