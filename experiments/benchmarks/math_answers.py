"""Answers of mathematics: the last number of a text, and formulas in LaTeX that mean the same.

Sources: EleutherAI/lm-evaluation-harness 0.4.13, `tasks/gsm8k` (flexible-extract and strict-match), `tasks/aime/utils.py`
(the answer in the last box), and the comparison of formulas of hendrycks/math, which the harness has too. One difference: two
whole numbers are equal whatever their leading zeros, so that 25 is AIME's 025.
"""

from __future__ import annotations

import re

_LOOSE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_WHOLE = re.compile(r"-?[0-9]{1,4000}")


def last_number(text: str) -> str:
    """Return the last number of a text, without thousands' commas, dollars and a final full stop; "" if there is none."""
    found = _LOOSE.findall(text)
    return _plain(max(found[-1], key=len).strip()) if found else ""


def marked_number(text: str) -> str:
    """Return the first number behind ``####``, as `last_number` does; "" if there is none."""
    found = _STRICT.search(text)
    return _plain(found.group(1)) if found else ""


def _plain(text: str) -> str:
    return text.replace(",", "").replace("$", "").removesuffix(".")


def final_formula(text: str) -> str:
    """Return the formula in the last box; without a box what stands from the first dollar sign to the last, or the text."""
    boxed = _last_box(text)
    if boxed is not None:
        return boxed
    first, last = text.find("$"), text.rfind("$")
    return text[first + 1 : last] if first < last else text


def _last_box(text: str) -> str | None:
    """Return the content of the last ``\\boxed``, with or without braces; None if there is none, or it is not closed."""
    if "\\boxed " in text:
        return text.split("\\boxed ")[-1].split("$")[0]
    start = max(text.rfind("\\boxed"), -1)
    start = start if start >= 0 else text.rfind("\\fbox")
    if start < 0:
        return None
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if text[at] == "}" and depth == 0:
            whole = text[start : at + 1]
            return whole[len("\\boxed{") : -1] if whole.startswith("\\boxed{") else None
    return None


class _Unclear(Exception):
    """The suite's program stops at this text, and compares the two texts as they are."""


def same_formula(one: str, other: str) -> bool:
    """Tell whether two answers are the same number or formula, as hendrycks/math compares them."""
    if all(map(_WHOLE.fullmatch, (one.strip(), other.strip()))):
        return int(one) == int(other)
    try:
        return _normal(one) == _normal(other)
    except _Unclear:
        return one == other


def _normal(text: str) -> str:
    """Bring a formula to the suite's normal form."""
    for old, new in (
        ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
        ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
    ):  # fmt: skip
        text = text.replace(old, new)
    if "\\text{ " in text:  # a unit on the right
        text, *rest = text.split("\\text{ ")
        if len(rest) != 1:
            raise _Unclear
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = f"0{text}" if text[0] == "." else text
    left, *right = text.split("=")
    if len(right) == 1 and len(left) <= 2:  # "k = "
        text = right[0]
    text = _braced_roots(text).replace(" ", "")
    text = _braced_fractions(text)
    return _slash(r"\frac{1}{2}" if text == "0.5" else text)


def _braced_roots(text: str) -> str:
    first, *parts = text.split("\\sqrt")
    if not all(parts):
        raise _Unclear
    return first + "".join("\\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}") for part in parts)


def _braced_fractions(text: str) -> str:
    r"""Put braces around the parts of \frac12, \frac1b and \frac1{72}."""
    made, *parts = text.split("\\frac")
    for part in parts:
        if not part:
            raise _Unclear
        if part[0] == "{":
            made += "\\frac" + part
        elif len(part) < 2:
            return text
        else:
            above, below, rest = part[0], part[1], part[2:]
            made += f"\\frac{{{above}}}{below if below == '{' else f'{{{below}}}'}{rest}"
    return made


def _slash(text: str) -> str:
    """Write a/b of two whole numbers as a fraction."""
    parts = text.split("/")
    if len(parts) != 2:
        return text
    try:
        above, below = (int(part) for part in parts)
    except ValueError as error:
        raise _Unclear from error
    return f"\\frac{{{above}}}{{{below}}}" if text == f"{above}/{below}" else text
