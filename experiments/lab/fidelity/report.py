"""Formats the tables of a record of `experiments.lab.fidelity`, with paired differences between methods."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.answering import budget_of, without_effect
from experiments.records import bootstrap_interval, method_title, short_commit, token_label
from experiments.records.report import Column, Row, row_table

FULL = "full"
_LEGEND = (
    "Every method is led along the same texts as Full, a decode step for each token. KL: KL(Full || method) of the "
    "next-token distributions, in nats, mean over texts. Above the nearest: the paired difference of KL to the method with "
    "the least KL among those that read no more bytes; bold: beyond noise; frontier: there is no nearer one. Same token: "
    "steps whose most likely token is Full's. Against Full: ratio of the perplexities of the texts' own tokens. Brackets: "
    "95 % bootstrap intervals over texts. Budget: tokens per KV head that the setting asks for; where it asks for none, the "
    "tokens attended. Read: bytes of keys, values and metadata per decode step, and as a share of Full's."
)
_ACCEPTED = (
    " Accepted: tokens per pass of Full where the method drafts up to 4 tokens ahead (`kvjax.Verified`), 1 to 5, by the runs "
    "of steps with the same token."
)


def cells(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Group rows by stream and length; in each group Full comes first, then the other methods by distance."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["stream"], row["length"]), []).append(row)
    ordered = sorted(groups, key=lambda cell: (list(dict.fromkeys(row["stream"] for row in rows)).index(cell[0]), cell[1]))
    return {cell: sorted(groups[cell], key=lambda row: (row["method"] != FULL, row["value"])) for cell in ordered}


def difference(row: Row, other: Row) -> tuple[float, tuple[float, float]]:
    """Compute the mean difference of KL between two methods on the same texts, in nats, and its paired 95 % interval.

    Raises:
        ValueError: the rows are not of the same texts.
    """
    same = [(one["stream"], one["length"], len(one["by_text"]["kl"])) for one in (row, other)]
    if same[0] != same[1]:
        raise ValueError(f"a paired difference needs rows of the same texts, got {same[0]} and {same[1]}")
    values = np.asarray(row["by_text"]["kl"]) - np.asarray(other["by_text"]["kl"])
    return float(values.mean()), bootstrap_interval(values)


def fidelity_tables(record: Mapping[str, Any]) -> str:
    """Format the tables of a record as Markdown, one for each stream and length."""
    settings, device = record["settings"], record.get("device") or {}
    commits = [run.get("commit") for run in (record.get("notes") or {}).get("runs", {}).values()]
    about = (
        f"Model {settings['model']}, {settings['dtype']}; {settings['samples']} texts of a stream, {settings['tokens']} "
        f"steps along each; prose: {settings['haystack']}, questions: {settings['task']}, seed {settings['seed']}. "
        f"Device {device.get('kind', '')}, commit "
        f"{', '.join(dict.fromkeys(map(short_commit, commits or [record.get('commit')])))}."
    )
    legend = _LEGEND + _ACCEPTED * _has_accepted(record["metrics"])
    if other := settings.get("reference"):
        about += f" Full is the reference's: {other['model']}, {other['dtype']}."
    texts = f"{settings['samples']} texts of {settings['tokens']:,} steps"
    parts = [f"# Distance from Full: {settings['model']}, {settings['dtype']}, {texts}", about, legend]
    for (stream, length), rows in cells(record["metrics"]).items():
        parts += [f"## {stream}, {token_label(length)} tokens", table(rows)]
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Row]) -> str:
    """Format the table of a stream at a length."""
    others = [row for row in rows if row["method"] != FULL]
    columns: dict[str, Column] = {
        "method": lambda row: method_title(row["method"]) + " (no effect)" * without_effect(row),
        "budget": lambda row: f"{budget_of(row):,}",
        "KL, nats": lambda row: f"{_digits(row['value'])} [{', '.join(map(_digits, row['interval_95']))}]",
        "above the nearest": lambda row: None if row["method"] == FULL else _above(row, others),
        "same token": lambda row: f"{row['agreement']:.1f} % {_ends(row, 'agreement', '.1f')}",
        "accepted": lambda row: f"{row['accepted']:.2f} {_ends(row, 'accepted', '.2f')}" if "accepted" in row else None,
        "perplexity": ("perplexity", 1, ",.4g"),
        "against Full": lambda row: f"{row['perplexity_ratio']:.4g} {_ends(row, 'perplexity_ratio', '.4g')}",
        "attended": lambda row: f"{row['attended_tokens']:,.0f} of {row['length_tokens']:,.0f}",
        "read": lambda row: f"{row['bytes_read_per_step'] / 1e6:.2f} MB ({_share_read(row):.1f} %)",
    }
    if not _has_accepted(rows):
        del columns["accepted"]
    return "\n".join(row_table(rows, columns))


def _ends(row: Row, field: str, style: str) -> str:
    """Format the interval of a field."""
    return f"[{', '.join(format(end, style) for end in row[f'{field}_interval_95'])}]"


def _share_read(row: Row) -> float:
    return 100 * row["bytes_read_per_step"] / row["full_bytes_read_per_step"]


def _has_accepted(rows: Sequence[Row]) -> bool:
    """Tell whether a row has tokens per pass, which records of earlier versions lack."""
    return any("accepted" in row for row in rows)


def _above(row: Row, others: Sequence[Row]) -> str:
    """Format the difference to the method with the least KL that reads no more bytes; bold if it is beyond noise."""
    best = min(
        (other for other in others if other["bytes_read_per_step"] <= row["bytes_read_per_step"]),
        key=lambda other: other["value"],
    )
    if best["value"] == row["value"]:
        return "frontier"
    mean, (low, high) = difference(row, best)
    text = f"{mean:+.3g} [{low:+.3g}, {high:+.3g}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def _digits(value: float) -> str:
    """Format a value with three significant digits."""
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.1e}"
