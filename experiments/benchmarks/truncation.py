"""Cut prompts that are longer than a limit. Suites cut differently, and scores depend on the cut."""

from __future__ import annotations

TRUNCATIONS = ("middle", "head", "tail", "error")


def truncate(ids: list[int], limit: int, mode: str) -> list[int]:
    """Shorten a prompt to at most `limit` tokens.

    Args:
        ids: token ids of the prompt.
        limit: most tokens that stay, at least 1.
        mode: "middle" drops the middle and keeps the first and the last `limit // 2` tokens, as LongBench and
            InfiniteBench do (so an odd limit keeps one token less); "head" keeps the beginning, "tail" the end;
            "error" refuses.

    Returns:
        A new list, with all of `ids` if they fit.

    Raises:
        ValueError: the mode is unknown, the limit is below 1, or the prompt is too long under "error".
    """
    if mode not in TRUNCATIONS:
        raise ValueError(f"unknown truncation mode {mode!r}, expected one of {TRUNCATIONS}")
    if limit < 1:
        raise ValueError(f"the limit must be at least 1 token, got {limit}")
    if len(ids) <= limit:
        return list(ids)
    if mode == "error":
        raise ValueError(f"the prompt has {len(ids)} tokens, expected at most {limit}; other modes are {TRUNCATIONS[:-1]}")
    if mode == "middle":
        half = limit // 2
        return [*ids[:half], *ids[len(ids) - half :]]
    return list(ids[:limit] if mode == "head" else ids[-limit:])
