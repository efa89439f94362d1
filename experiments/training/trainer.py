"""A training run: compiled steps, data workers, progress, checkpoints, export. `experiments.training` is its command.

Checkpoints (orbax) are saved as it goes and when it is stopped by SIGTERM or the time limit; a resumed run repeats
exactly what an uninterrupted one does.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import math
import pathlib
import shutil
import signal
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from tqdm import tqdm

import models
from experiments.training import loss as learner
from experiments.training.curriculum import Curriculum
from experiments.training.data import EOS_ID, ROW_TASKS, Loader

BUILTIN = pathlib.Path(models.__file__).parent / "builtin"  # holds the tokenizer before there is a model
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
LM_WEIGHT_FIRST = 0.3  # until the induction circuit has formed
LM_WEIGHT = 0.1
LOG_EVERY = 50  # steps
IN_FLIGHT = 4  # steps dispatched ahead of the one whose metrics are read


@dataclasses.dataclass(frozen=True)
class Size:
    """A model with the batches it is trained on.

    Attributes:
        config: the model.
        lengths: bucket lengths of the curriculum, tokens.
        tokens_per_step: rows x length.
        steps: default length of the run.
    """

    config: models.ModelConfig
    lengths: tuple[int, ...]
    tokens_per_step: int
    steps: int


def sizes(name: str) -> Size:
    """The training size called "full" (15M parameters, one H100) or "toy" (seconds on a CPU).

    Raises:
        ValueError: unknown name.
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


class Checkpoints:
    """Orbax checkpoints of one run, tied to its settings.

    Args:
        directory: where they lie.
        settings: what must not change between a run and its continuation.
    """

    def __init__(self, directory: pathlib.Path, settings: dict[str, Any]) -> None:
        self._settings = json.loads(json.dumps(settings))  # what a round trip through the file gives
        self._manager = ocp.CheckpointManager(
            directory.resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        )

    def save(self, step: int, state: learner.State) -> None:
        """Saves the state after `step` finished steps."""
        if self._manager.latest_step() == step:
            return
        saved = ocp.args.Composite(state=ocp.args.StandardSave(state), settings=ocp.args.JsonSave(self._settings))
        self._manager.save(step, args=saved)
        self._manager.wait_until_finished()

    def restore(self, like: learner.State) -> tuple[int, learner.State]:
        """The newest state.

        Raises:
            ValueError: there is none, or it belongs to other settings.
        """
        step = self._manager.latest_step()
        if step is None:
            raise ValueError(f"nothing to resume in {self._manager.directory}")
        settings = self._manager.restore(step, args=ocp.args.Composite(settings=ocp.args.JsonRestore()))["settings"]
        if settings != self._settings:
            raise ValueError(f"checkpoint was made with {settings}, this run has {self._settings}")
        template = ocp.args.Composite(state=ocp.args.StandardRestore(like))
        return step, self._manager.restore(step, args=template)["state"]

    def close(self) -> None:
        """Releases the directory."""
        self._manager.close()


class Compiler:
    """Compiles the step for every batch shape, in the background and in the order the run needs them."""

    def __init__(self, step: learner.Step, state: learner.State, shapes: Sequence[tuple[int, int]]) -> None:
        jitted = jax.jit(step, donate_argnums=0)
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)

        def build(rows: int, length: int) -> Any:
            tokens = jax.ShapeDtypeStruct((rows, length), jnp.uint16)
            tasks = jax.ShapeDtypeStruct((rows,), jnp.int32)
            return jitted.lower(like, tokens, tokens, tasks, jax.ShapeDtypeStruct((), jnp.float32)).compile()

        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=2)
        self._steps = {shape: self._pool.submit(build, *shape) for shape in shapes}

    def get(self, shape: tuple[int, int]) -> Any:
        """The compiled step of one (rows, length); waits for it if need be."""
        return self._steps[shape].result()

    def close(self) -> None:
        """Gives up what has not been compiled yet."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Progress:
    """Progress bar, time left and the log file.

    Args:
        curriculum: batch shapes, for the time left.
        first_step: where the run starts.
        log: train_log.jsonl; lines of steps not yet done (an interrupted run's tail) are dropped.
    """

    def __init__(self, curriculum: Curriculum, first_step: int, log: pathlib.Path) -> None:
        self._curriculum = curriculum
        self._log = log
        kept = (
            [line for line in log.read_text().splitlines() if json.loads(line)["step"] <= first_step]
            if log.exists()
            else []
        )
        log.write_text("".join(line + "\n" for line in kept))
        self._left = collections.Counter(
            curriculum.bucket(step)[1] for step in range(first_step, curriculum.total_steps)
        )
        self._initial = self._left.copy()
        self._seconds: dict[int, float] = {}  # running mean seconds a step, by bucket
        self._warm: set[int] = set()  # buckets whose first step, which waits for its compilation, is behind
        self._last = time.monotonic()
        self._window: list[dict[str, Any]] = []
        self._bar = tqdm(
            total=curriculum.total_steps,
            initial=first_step,
            unit="step",
            mininterval=2.0,
            bar_format="{percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}] {postfix}",
        )

    def update(self, step: int, length: int, metrics: dict[str, np.ndarray]) -> None:
        """Takes note of a finished step.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(f"loss is {metrics['loss']} at step {step}, expected a finite number")
        before = self._seconds[length] if length in self._warm else seconds
        self._seconds[length] = 0.85 * before + 0.15 * seconds
        if length in self._seconds and self._left[length] < self._initial[length]:
            self._warm.add(length)
        self._left[length] -= 1
        self._window.append({**metrics, "seconds": seconds})
        summary = self._summary(step)
        self._bar.set_postfix_str(
            f"T={length} loss {summary['loss']:.3f} answer {summary['answer_loss']:.3f} lm {summary['lm_loss']:.2f} "
            f"exact {summary['exact']:.2f} {summary['tokens_per_second'] / 1e6:.2f}M tok/s "
            f"left {self.seconds_left() / 60:.1f} min",
            refresh=False,
        )
        self._bar.update()
        if (step + 1) % LOG_EVERY == 0 or step + 1 == self._curriculum.total_steps:
            with self._log.open("a") as file:
                file.write(json.dumps(summary) + "\n")
            tqdm.write(
                f"{step + 1:6d} answer {summary['answer_loss']:.3f} lm {summary['lm_loss']:.2f} | "
                + " ".join(f"{name} {100 * value:.0f}" for name, value in summary["accuracy"].items())
            )
            self._window = []

    def seconds_left(self) -> float:
        """Estimated seconds to the end; buckets not seen yet count as the slowest one so far."""
        slowest = max(self._seconds.values(), default=0.0)
        return sum(count * self._seconds.get(length, slowest) for length, count in self._left.items())

    def _summary(self, step: int) -> dict[str, Any]:
        def mean(name: str) -> float:
            return float(np.mean([entry[name] for entry in self._window]))

        right, asked = (np.sum([entry[name] for entry in self._window], axis=0) for name in ("right", "asked"))
        seconds = sum(entry["seconds"] for entry in self._window)
        return {
            "step": step + 1,
            "tokens": (step + 1) * self._curriculum.tokens_per_step,
            "loss": mean("loss"),
            "answer_loss": mean("answer"),
            "lm_loss": mean("lm"),
            "gradient_norm": mean("gradient_norm"),
            "learning_rate": float(learner.schedule(self._curriculum.total_steps)(step)),
            "tokens_per_second": len(self._window) * self._curriculum.tokens_per_step / max(seconds, 1e-9),
            "exact": float(right.sum() / max(1, asked.sum())),
            "accuracy": {name: round(float(r / a), 4) for name, r, a in zip(ROW_TASKS, right, asked, strict=True) if a},
            "questions": {name: int(a) for name, a in zip(ROW_TASKS, asked, strict=True) if a},
        }

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()


def export(directory: pathlib.Path, params: Any, config: models.ModelConfig, tokenizer: pathlib.Path) -> None:
    """Writes the model in Hugging Face layout, bfloat16, with its tokenizer."""
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
) -> learner.State:
    """Trains, saves and exports.

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
        workers: data processes; 0 makes the data in this process.
        stop_after: stop (and save) after this many steps of the whole run, as if the time were over.

    Returns:
        The last state.

    Raises:
        ValueError: nothing to resume, or the checkpoint of another run.
        FloatingPointError: loss not finite.
    """
    begun = time.monotonic()
    on_gpu = jax.default_backend() == "gpu"
    config = size.config if on_gpu else dataclasses.replace(size.config, dtype="float32")
    curriculum = Curriculum(steps, size.tokens_per_step, size.lengths, seed)
    settings = {**dataclasses.asdict(curriculum), "texts": [path.name for path in texts]}
    out.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(out / "checkpoints", settings)
    state = learner.initial_state(config, steps, seed)
    first = 0
    if resume:
        first, state = checkpoints.restore(state)
    last = steps if stop_after is None else min(stop_after, steps)
    shapes = list(dict.fromkeys(curriculum.bucket(step) for step in range(first, last)))
    compiler = Compiler(learner.make_step(config, steps, "cudnn" if on_gpu else "xla"), state, shapes)
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
