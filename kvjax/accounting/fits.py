"""The most that fits the bytes of a device: the largest budget of a method, the longest prompt, the most rows."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, cast

from jax.sharding import AbstractMesh, Mesh

from kvjax.accounting.memory import Needed, free_bytes, memory_needed
from kvjax.accounting.phases import gib
from kvjax.protocol.fields import number, positive_int, shown
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model
from kvjax.registry import classes, resolve

SPARE = 2 << 30  # bytes for what `memory_needed` does not count
_MOST_TOKENS, _MOST_ROWS = 1 << 24, 1 << 14  # whatever has room for these is said to have room for no more
_SOON = 1 << 20  # tried first, because some methods take seconds for the shapes of very long prompts


def largest_budget(
    method: Method | str,
    config: Model,
    *,
    batch: int,
    prompt_slots: int,
    max_new_tokens: int,
    device_bytes: float | None = None,
    spare: int = SPARE,
    **sizes: Any,
) -> int:
    """Find the largest ``budget`` with which a cache fits the device, at the peak of prefill and while decoding.

    For example: ``SnapKV(budget=largest_budget("snapkv", config, batch=64, prompt_slots=32768, max_new_tokens=256,
    device_bytes=80_000_000_000, params=models.param_shapes(config)))``. A method that keeps every token needs the same
    bytes under any budget.

    Args:
        method: a method with a field ``budget``, whose value does not matter; or its name. Or a wrapper around such a
            method: the budget is then for the first of its inner methods that has one.
        config: the model's description.
        batch: rows.
        prompt_slots: tokens of the padded prompt.
        max_new_tokens: tokens that may follow.
        device_bytes: bytes of a device that may be used; None means all that are free now.
        spare: bytes of these to leave for what is not counted.
        **sizes: ``chunk_size``, ``mesh``, ``kv_dtype``, ``order`` and ``params``, as in `kvjax.memory_needed`. Parameters
            that are on the device already, beside its free bytes, must not be given.

    Returns:
        Tokens, at most ``prompt_slots + max_new_tokens``.

    Raises:
        ValueError: neither the method nor an inner method has a budget, or ``device_bytes`` is None and the device does not
            report free memory; or `kvjax.memory_needed` refuses the sizes.
        MemoryError: not even the smallest budget fits.
    """
    method, most = resolve(method, prompt_slots), prompt_slots + max_new_tokens
    name, have = type(method).__name__, _have("largest_budget", device_bytes, sizes.get("mesh"), spare)
    if with_budget(method, most) is None:
        known = ", ".join(cls.__name__ for cls in classes().values() if "budget" in cls.__dataclass_fields__)
        raise ValueError(
            f"largest_budget: expected a method with a field budget, or a wrapper around one, got {name}; these have the "
            f"field: {known}"
        )

    def needed(tokens: int) -> Needed:
        made = cast("Method", with_budget(method, tokens))
        return memory_needed(made, config, batch=batch, prompt_slots=prompt_slots, max_new_tokens=max_new_tokens, **sizes)

    least = _least(lambda tokens: with_budget(method, tokens), most)
    found = _most(lambda tokens: _bytes(needed(tokens)) + spare, have, least, most)
    if found is None:
        raise MemoryError(
            f"not even the smallest budget of {name} fits, {least} tokens: got {gib(have)} of device memory, of which "
            f"{gib(spare)} are to spare, and it needs {needed(least)}; shorten the prompt, take fewer rows, or "
            "kv_dtype='int8'"
        )
    return found


def longest_prompt(
    method: Method | str,
    config: Model,
    *,
    batch: int,
    max_new_tokens: int,
    device_bytes: float | None = None,
    spare: int = SPARE,
    step: int = 1,
    chunk_size: int = 8192,
    **sizes: Any,
) -> int | None:
    """Find the longest prompt with which a cache fits the device; arguments and errors as in `largest_budget`.

    A budget that is a share of the prompt grows with it. The model's positions do not count.

    Args:
        method: any method, or its name.
        config: the model's description.
        batch: rows.
        max_new_tokens: tokens that may follow.
        device_bytes: bytes of a device that may be used; None means all that are free now.
        spare: bytes of these to leave for what is not counted.
        step: tokens; the result is less than so many below the longest.
        chunk_size: as in `kvjax.prefill`.
        **sizes: as in `largest_budget`.

    Returns:
        Tokens, 0 if no prompt fits; None if the cache does not grow with the prompt, and any fits.
    """

    def needs(tokens: int) -> int:
        return spare + _bytes(memory_needed(method, config, prompt_slots=tokens, **given))

    given = {"batch": batch, "max_new_tokens": max_new_tokens, "chunk_size": chunk_size, **sizes}
    have, step = _have("longest_prompt", device_bytes, sizes.get("mesh"), spare), positive_int("step", step)
    least = _least(lambda tokens: resolve(method, tokens), _MOST_TOKENS)
    level = positive_int("chunk_size", chunk_size)  # a prompt's storage is whole chunks
    return _unbounded(_most(needs, have, least, _MOST_TOKENS, step, level), _MOST_TOKENS)


def most_rows(
    method: Method | str,
    config: Model,
    *,
    prompt_slots: int,
    max_new_tokens: int,
    device_bytes: float | None = None,
    spare: int = SPARE,
    **sizes: Any,
) -> int | None:
    """Find the most rows with which a cache fits the device; arguments and errors as in `longest_prompt`.

    Args:
        method: any method, or its name.
        config: the model's description.
        prompt_slots: tokens of the padded prompt.
        max_new_tokens: tokens that may follow.
        device_bytes: bytes of a device that may be used; None means all that are free now.
        spare: bytes of these to leave for what is not counted.
        **sizes: as in `largest_budget`; on a mesh the rows are a multiple of its axis ``data``.

    Returns:
        Rows, 0 if not even one fits; None if there is room for any number.
    """
    mesh = sizes.get("mesh")
    groups = 1 if mesh is None else mesh.shape.get("data", 1)

    def needs(rows: int) -> int:
        needed = memory_needed(
            method, config, batch=rows * groups, prompt_slots=prompt_slots, max_new_tokens=max_new_tokens, **sizes
        )
        return spare + _bytes(needed)

    have = _have("most_rows", device_bytes, mesh, spare)
    found = _unbounded(_most(needs, have, 1, _MOST_ROWS), _MOST_ROWS)
    return found and found * groups


def with_budget(method: Method, tokens: int) -> Method | None:
    """Return a method with another ``budget``, or with one in its first inner method that has a budget; None without any."""
    fields = vars(method)
    if fields.get("budget") is not None:
        return dataclasses.replace(cast("Any", method), budget=tokens, capacity=None)
    for name, inner in fields.items():
        if isinstance(inner, Method) and (changed := with_budget(inner, tokens)) is not None:
            return dataclasses.replace(cast("Any", method), **{name: changed})
    return None


def _least(make: Callable[[int], Any], most: int) -> int:
    """Find the smallest number that ``make`` does not refuse: some budgets hold a window or whole pages. At most ``most``."""

    def takes(number: int) -> bool:
        try:
            make(number)
        except ValueError:
            return False
        return True

    low, high = 0, 1  # refused, perhaps taken
    while high < most and not takes(high):
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if takes(middle) else (middle, high)
    return high


def _most(needs: Callable[[int], int], have: int, least: int, most: int, step: int = 1, level: int = 1) -> int | None:
    """Find the largest number that needs at most ``have`` bytes, to ``step``; None if ``least`` needs more.

    ``needs`` must not fall, and rises mostly behind multiples of ``level``.
    """
    needs = functools.cache(needs)
    ends = [least, *(x for x in (4 * level, _SOON, most) if least < x <= most)]
    above = next((at for at, end in enumerate(ends) if at and needs(end) > have), len(ends))
    if above < 2 and needs(least) > have:  # not asked where a larger number fits
        return None
    if above == len(ends):
        return most
    low, high = _between(needs, have, ends[above - 1], ends[above], max(level, step))
    over = (low // step + 1) * step
    if over >= high or needs(over) > have:
        return low
    return _between(needs, have, over, high, step)[0]


def _between(needs: Callable[[int], int], have: int, low: int, high: int, unit: int) -> tuple[int, int]:
    """Narrow ``low``, which fits, and ``high``, which does not, until no multiple of ``unit`` is between them.

    The next number to try is where the line through both ends has ``have`` bytes; every third is the middle.
    """
    for turn in itertools.count(1):
        first, last = low // unit + 1, -(-high // unit) - 1
        if first > last:
            break
        line = low + (high - low) * (have - needs(low)) // (needs(high) - needs(low))
        guess = unit * (min(max(line // unit, first), last) if turn % 3 else (first + last) // 2)
        low, high = (guess, high) if needs(guess) <= have else (low, guess)
    return low, high


def _bytes(needed: Needed) -> int:
    return needed.peak + needed.weights


def _have(who: str, device_bytes: float | None, mesh: Mesh | AbstractMesh | None, spare: int) -> int:
    if device_bytes is None:
        device_bytes = free_bytes(mesh)
    if device_bytes is None:
        raise ValueError(f"{who}: this device does not say how much memory is free: pass device_bytes")
    for name, given in (("device_bytes", device_bytes), ("spare", spare)):
        size = number(given)
        if type(size) not in (int, float) or not math.isfinite(size):
            raise ValueError(f"{name} must be a number of bytes such as 24e9, got {shown(given)}")
    return int(number(device_bytes))


def _unbounded(found: int | None, most: int) -> int | None:
    return None if found == most else found or 0
