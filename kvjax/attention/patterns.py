"""Patterns that say which keys the query heads of a prompt attend to; files of patterns, and checks against a model."""

import dataclasses
import json
import pathlib
from typing import Any

from kvjax.protocol.fields import Limits, check_value, shown
from kvjax.protocol.typing import Model

KINDS = {  # and the fields that each kind reads
    "vertical_slash": ("columns", "diagonals"),
    "a_shape": ("columns", "diagonals"),
    "block_sparse": ("blocks",),
    "xattention": ("share",),
    "flexprefill": ("share", "tau", "min_budget"),
    "blasst": ("factor",),
}
# The names of kinds in MInference's files; no other kind is in them.
IN_FILES = {"vertical_and_slash": "vertical_slash", "stream_llm": "a_shape", "block_sparse": "block_sparse"}
_NUMBERS = {
    "columns": (int, Limits(least=0)), "diagonals": (int, Limits(least=1)), "blocks": (int, Limits(least=1)),
    "share": (float, Limits(above=0, most=1)), "tau": (float, Limits(least=0)), "min_budget": (int, Limits(least=1)),
    "factor": (float, Limits(above=0)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The keys that the queries of one head attend to, under `kvjax.wrappers.Prefill`.

    Attributes:
        kind: "vertical_slash": the columns and the diagonals with most attention; "a_shape": the first and the newest tokens;
            "block_sparse": the best blocks of keys for each block of queries; "xattention" and "flexprefill": as many blocks,
            or columns and diagonals, as hold a share of the attention in this text; "blasst": blocks above a threshold.
        columns: with "vertical_slash" and "a_shape": keys that all queries see; at least 0.
        diagonals: with "vertical_slash" and "a_shape": distances at which a query sees keys, its own token included; at least
            1.
        blocks: with "block_sparse": blocks of keys for each block of queries, its own included; at least 1.
        share: with "xattention" and "flexprefill": how much of the estimated attention to keep; above 0, and 1 keeps all.
        tau: with "flexprefill": the error of the estimate by blocks below which the head attends by blocks; 0 means never.
        min_budget: with "flexprefill": tokens, the fewest columns, diagonals, or keys in blocks; at least 1.
        factor: with "blasst": the threshold times the tokens of the text; above 0.

    Raises:
        ValueError: another kind, a number out of these ranges, or a field that the kind does not read.
    """

    kind: str = "vertical_slash"
    columns: int = 1000
    diagonals: int = 6096
    blocks: int = 100
    share: float = 0.9
    tau: float = 0.1
    min_budget: int = 1024
    factor: float = 1000.0

    def __post_init__(self) -> None:
        check_value("Pattern: kind", self.kind, (str,), Limits(choices=tuple(KINDS)), static=True)
        for name, (kind, limits) in _NUMBERS.items():
            checked = check_value(f"Pattern: {name}", vars(self)[name], (kind,), limits, static=True)
            object.__setattr__(self, name, checked)
        given = {field.name: vars(self)[field.name] for field in dataclasses.fields(self) if field.name in _NUMBERS}
        read = KINDS[self.kind]
        unread = [f"{name}={value}" for name, value in given.items() if name not in read and value != vars(Pattern)[name]]
        if unread:
            raise ValueError(
                f"Pattern: kind {self.kind!r} reads {' and '.join(read)} only, got {', '.join(unread)}, of another kind"
            )

    def covers(self, slots: int, block: int) -> bool:
        """Tell whether the pattern has room for all of ``slots`` tokens in blocks of ``block``, whatever the text is."""
        match self.kind:
            case "block_sparse":
                return self.blocks * block >= slots
            case "xattention":
                return self.share >= 1 or 2 * block >= slots  # the first and the own block are attended for certain
            case "blasst":
                return slots <= 384  # as above, in the blocks of `prefix_attention`
            case "flexprefill":
                return self.share >= 1 or self.min_budget >= slots
        return max(self.columns, self.diagonals) >= slots


Table = tuple[tuple[Pattern, ...], ...]  # a pattern for each query head, layer by layer
FILE = "patterns.json"  # in a model's folder


def patterns(path: str | pathlib.Path, config: Model) -> Table:
    """Load the patterns of a model's query heads from a file, for the knob ``pattern`` of `kvjax.wrappers.Prefill`.

    The file is JSON as microsoft/MInference has it, and as ``python -m experiments.heads.patterns`` writes it: a list with
    an object for each layer, which has for each query head ``"HEAD": [kind, number, number, score]``. The numbers are columns
    and diagonals with the kinds "vertical_and_slash" and "stream_llm" (the A-shape). With the kind "block_sparse" the first
    number is the number of blocks. MInference's files have no such entry, and its code would take 100 blocks whatever the
    number. The score is not read.

    Args:
        path: the file, or a model's folder with a file ``patterns.json``.
        config: the model's description.

    Returns:
        A tuple for each layer, of a `Pattern` for each query head.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds something else, or patterns for other numbers of layers or heads.
    """
    file = pathlib.Path(path).expanduser()
    if file.is_dir():
        file = file / FILE
    if not file.is_file():
        raise FileNotFoundError(f"no patterns in {file}: expected a file, which experiments.heads.patterns writes")
    try:
        table = tuple(_of_layer(heads) for heads in json.loads(file.read_text(encoding="utf-8-sig")))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f'{file} holds no patterns, expected [{{"HEAD": [kind, number, number, score]}}], got: {reason}'
        ) from error
    sizes = sorted({len(heads) for heads in table})
    if len(table) != config.num_layers or sizes != [config.num_q_heads]:
        raise ValueError(
            f"{file} has patterns for {len(table)} layers of {' or '.join(map(str, sizes)) or 0} heads, the model has "
            f"{config.num_layers} layers of {config.num_q_heads} query heads: these are patterns of another model"
        )
    return table


def check_pattern(owner: str, given: Any) -> None:
    """Refuse a value that is no `Pattern`, no tuple of a layer's patterns, and no `Table`; ``owner`` is for the message.

    Raises:
        ValueError: the message has what was given.
    """
    heads, sizes = heads_of(given), {len(x) for x in _rows(given) if type(x) is tuple}
    if not heads or any(type(head) is not Pattern for head in heads) or len(sizes) > 1:
        raise ValueError(
            f"{owner}: pattern must be a kvjax.wrappers.Pattern or one for each query head of each layer, as "
            f"kvjax.wrappers.patterns reads them from a file, got {shown(given)}"
        )


def heads_of(given: Any) -> list[Any]:
    """List the patterns of all heads of a `Pattern`, a tuple of a layer's patterns, or a `Table`."""
    return [head for row in _rows(given) for head in (row if type(row) is tuple else (row,))]


def _rows(given: Any) -> tuple:
    return given if type(given) is tuple and given and type(given[0]) is tuple else (given,)


def is_table(given: Pattern | tuple[Pattern, ...] | Table) -> bool:
    """Tell whether patterns are for a whole model."""
    return isinstance(given, tuple) and isinstance(given[0], tuple)


def check_table_sizes(owner: str, table: Table, model: Model) -> None:
    """Refuse patterns for other numbers of layers or query heads than the model has; ``owner`` is for the message.

    Raises:
        ValueError: the patterns do not fit the model.
    """
    if (len(table), len(table[0])) != (model.num_layers, model.num_q_heads):
        raise ValueError(
            f"{owner}: pattern is for {len(table)} layers of {len(table[0])} query heads, the model has {model.num_layers} "
            f"layers of {model.num_q_heads}: these are patterns of another model"
        )


def _of_layer(given: Any) -> tuple[Pattern, ...]:
    heads = {int(head): entry for head, entry in given.items()}
    missing = [head for head in range(len(heads)) if head not in heads]
    if missing:
        raise ValueError(f"no entry {missing[0]}")
    entries = [(IN_FILES[name], one, other) for name, one, other, *_ in (heads[head] for head in range(len(heads)))]
    return tuple(
        Pattern(kind, blocks=one) if kind == "block_sparse" else Pattern(kind, columns=one, diagonals=other)
        for kind, one, other in entries
    )
