"""A training run: compiled steps, data workers, progress, checkpoints, export. `experiments.training` is its command.

Checkpoints are saved during the run, and when SIGTERM or the time limit stops it. A resumed run computes exactly the same as
an uninterrupted run.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import math
import pathlib
import shutil
import signal
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import models
from experiments.training.checkpoints import Checkpoints
from experiments.training.curriculum import Curriculum
from experiments.training.data import EOS_ID, Loader
from experiments.training.loss import State, Step, initial_state, make_step
from experiments.training.progress import Progress

BUILTIN = pathlib.Path(models.__file__).parent / "builtin"  # holds the tokenizer even before there is a model
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
LM_WEIGHT_FIRST = 0.3  # as long as the induction circuit is forming
LM_WEIGHT = 0.1
IN_FLIGHT = 4  # steps that are dispatched before the metrics of the first of them are read


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and the batches that it is trained on.

    Attributes:
        config: the model.
        lengths: bucket lengths of the curriculum, in tokens.
        tokens_per_step: rows x length of a batch.
        steps: default length of the run, in optimiser steps.
    """

    config: models.ModelConfig
    lengths: tuple[int, ...]
    tokens_per_step: int
    steps: int


def sizes(name: str) -> Size:
    """The training size called "full" (15M parameters, one H100) or "toy" (seconds on a CPU).

    Raises:
        ValueError: an unknown name.
    """
    full = models.ModelConfig(
        vocab_size=5120, hidden_size=384, intermediate_size=1024, num_layers=8, num_q_heads=8, num_kv_heads=2,
        head_dim=64, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True,
        qk_norm=True, eos_token_ids=(EOS_ID,), dtype="bfloat16",
    )  # fmt: skip
    if name == "full":
        return Size(full, (512, 1024, 2048, 4096, 8192, 16384), 131072, 6000)
    if name == "toy":
        toy = dataclasses.replace(
            full,
            hidden_size=64,
            intermediate_size=128,
            num_layers=2,
            num_q_heads=4,
            num_kv_heads=1,
            head_dim=16,
            max_position_embeddings=1024,
            dtype="float32",
        )
        return Size(toy, (256, 384), 1536, 40)
    raise ValueError(f"unknown size {name!r}, expected 'full' or 'toy'")


class Compiler:
    """Compiles the step for every batch shape, in the background and in the order in which the run needs them.

    Args:
        step: see `experiments.training.loss.make_step`.
        state: arrays of the state's shapes and dtypes.
        shapes: (rows, length) of the batches.
    """

    def __init__(self, step: Step, state: State, shapes: Sequence[tuple[int, int]]) -> None:
        jitted = jax.jit(step, donate_argnums=0)
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)

        def build(rows: int, length: int) -> Any:
            tokens = jax.ShapeDtypeStruct((rows, length), jnp.uint16)
            tasks = jax.ShapeDtypeStruct((rows,), jnp.int32)
            return jitted.lower(like, tokens, tokens, tasks, jax.ShapeDtypeStruct((), jnp.float32)).compile()

        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=2)
        self._steps = {shape: self._pool.submit(build, *shape) for shape in shapes}

    def get(self, shape: tuple[int, int]) -> Any:
        """The compiled step of a (rows, length); waits until it is ready."""
        return self._steps[shape].result()

    def close(self) -> None:
        """Give up the steps that have not been compiled yet."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def export(directory: pathlib.Path, params: Any, config: models.ModelConfig, tokenizer: pathlib.Path) -> None:
    """Write the model in Hugging Face layout and bfloat16, with its tokenizer."""
    models.save_pretrained(directory, jax.device_get(params), dataclasses.replace(config, dtype="bfloat16"))
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, directory / name)


def train(
    out: pathlib.Path,
    *,
    size: Size,
    steps: int,
    texts: Sequence[pathlib.Path] = (),
    tokenizer: pathlib.Path,
    minutes: float = math.inf,
    save_minutes: float = 4.0,
    resume: bool = False,
    seed: int = 0,
    workers: int = 14,
    stop_after: int | None = None,
) -> State:
    """Train, save and export a model.

    Args:
        out: directory for checkpoints, the log and the export.
        size: model and batches.
        steps: length of the whole run.
        texts: prose files besides `pydoc_data.topics`.
        tokenizer: directory with the tokenizer files.
        minutes: wall-clock limit of this call; the run is saved and can be resumed.
        save_minutes: minutes between checkpoints.
        resume: continue from the newest checkpoint in `out`.
        seed: of parameters and data.
        workers: data processes; with 0, this process makes the data.
        stop_after: stop and save after this many steps of the whole run, as if the time were over.

    Returns:
        The last state.

    Raises:
        ValueError: there is nothing to resume, or the checkpoint belongs to another run.
        FloatingPointError: the loss is not finite.
    """
    begun = time.monotonic()
    on_gpu = jax.default_backend() == "gpu"
    config = size.config if on_gpu else dataclasses.replace(size.config, dtype="float32")
    curriculum = Curriculum(steps, size.tokens_per_step, size.lengths, seed)
    settings = {**dataclasses.asdict(curriculum), "texts": [path.name for path in texts]}
    out.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(out / "checkpoints", settings)
    state = initial_state(config, steps, seed)
    first = 0
    if resume:
        first, state = checkpoints.restore(state)
    last = steps if stop_after is None else min(stop_after, steps)
    shapes = list(dict.fromkeys(curriculum.bucket(step) for step in range(first, last)))
    compiler = Compiler(make_step(config, steps, "cudnn" if on_gpu else "xla"), state, shapes)
    loader = Loader(tokenizer / "tokenizer.json", texts, curriculum, seed, first, workers)
    progress = Progress(curriculum, first, out / "train_log.jsonl")
    stopped: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, frame: stopped.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    in_flight: collections.deque = collections.deque()
    saved = time.monotonic()
    step = first
    try:
        while step < last and not stopped and time.monotonic() - begun < 60 * minutes:
            shape = curriculum.bucket(step)
            batch = loader.next()
            lm_weight = LM_WEIGHT_FIRST if curriculum.is_first_stage(step) else LM_WEIGHT
            state, metrics = compiler.get(shape)(
                state,
                jnp.asarray(batch.tokens),
                jnp.asarray(batch.roles),
                jnp.asarray(batch.tasks),
                jnp.float32(lm_weight),
            )
            in_flight.append((step, shape[1], metrics))
            step += 1
            if len(in_flight) > IN_FLIGHT:
                done, length, metrics = in_flight.popleft()
                progress.update(done, length, jax.device_get(metrics))
            if time.monotonic() - saved > 60 * save_minutes:
                checkpoints.save(step, state)
                saved = time.monotonic()
        while in_flight:
            done, length, metrics = in_flight.popleft()
            progress.update(done, length, jax.device_get(metrics))
        checkpoints.save(step, state)
        export(out / "export", state["params"], size.config, tokenizer)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        loader.close()
        compiler.close()
        progress.close()
        checkpoints.close()
    return state
