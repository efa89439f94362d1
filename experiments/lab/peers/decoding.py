"""Time per token of Hugging Face's `generate`, from its first token to its last. This file needs torch."""

from __future__ import annotations

import dataclasses
import time

import torch
import transformers


@dataclasses.dataclass(frozen=True)
class Times:
    """The time that decoding took.

    Attributes:
        spans: seconds per token of each repeat.
        compile: seconds of the first call beyond the time of its tokens: compiling and capturing graphs.
    """

    spans: tuple[float, ...]
    compile: float


class _Clock:
    """Notes the time after the first and after the last token; `generate` asks it after every token whether to stop."""

    def __init__(self, last: int, batch: int, device: torch.device) -> None:
        self.times: list[float] = []
        self._count, self._last, self._device = 0, last, device
        self._go_on = torch.zeros((batch,), dtype=torch.bool, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: object, **more: object) -> torch.Tensor:
        self._count += 1
        if self._count in (1, self._last):
            wait(self._device)
            self.times.append(time.perf_counter())
        return self._go_on


def wait(device: torch.device) -> None:
    """Wait until the device has finished all work that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decode_times(
    model: transformers.PreTrainedModel,
    cache: transformers.Cache,
    *,
    batch: int,
    length: int,
    tokens: int,
    repeats: int,
    compiled: str | None,
) -> Times:
    """Time greedy decoding. Each repeat continues where the previous repeat ended, and the first call is not counted.

    `generate` feeds its first token by a step that it never compiles; this step is not timed.

    Args:
        model: the model.
        cache: holds ``length`` tokens, and has room for ``(tokens + 1) * (repeats + 1)`` more.
        batch: rows.
        length: tokens stored.
        tokens: tokens timed per repeat.
        repeats: measurements.
        compiled: mode of torch.compile; None does not compile.

    Raises:
        RuntimeError: `generate` stopped early.
    """
    how = None
    if compiled is not None:
        how = transformers.CompileConfig(mode=compiled)
        how._compile_all_devices = model.device.type == "cpu"  # for tests: `generate` compiles by itself on GPUs only
    chosen = transformers.GenerationConfig(
        max_new_tokens=tokens + 1, do_sample=False, compile_config=how, disable_compile=compiled is None
    )
    spans, first, stored = [], 0.0, length
    for repeat in range(repeats + 1):
        # `generate` takes the whole text and drops what the cache holds; which tokens these were does not matter.
        text = torch.randint(0, model.config.vocab_size, (batch, stored + 1), device=model.device)
        clock = _Clock(tokens + 1, batch, model.device)
        wait(model.device)
        begun = time.perf_counter()
        out = model.generate(
            text,
            attention_mask=torch.ones_like(text),
            past_key_values=cache,
            generation_config=chosen,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
        wait(model.device)
        if repeat == 0:
            first = time.perf_counter() - begun
        if out.shape[1] != text.shape[1] + tokens + 1 or len(clock.times) != 2:
            raise RuntimeError(f"generate made {out.shape[1] - text.shape[1]} tokens, expected {tokens + 1}")
        spans.append((clock.times[1] - clock.times[0]) / tokens)
        stored += tokens + 1
    steady = min(spans[1:]) * (tokens + 1)
    return Times(spans=tuple(spans[1:]), compile=max(0.0, first - steady))
