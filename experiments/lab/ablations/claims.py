"""The papers' claims about their parts, as data: which rows must be better than which rows, and where the paper says so.

A row of a table is found by its setting (see `experiments.lab.ablations.arms.Arm`). A comparison pairs each row that has the
first setting with each row that has the second setting and is equal otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

Setting = Mapping[str, Any]
FULL: Setting = {"method": "full"}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Rows that should be better than other rows.

    Attributes:
        better: setting of the rows that should be better.
        worse: setting of the rows that should be worse.
        points: how many points of the score the first rows may be behind; 0 asks for a lead.
        nats: how many nats farther from Full the first rows may be; None leaves the distance out.
        tasks: names of the tasks that count; an empty tuple takes all tasks.
    """

    better: Setting
    worse: Setting
    points: float = 0.0
    nats: float | None = 0.0
    tasks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence of a paper.

    Attributes:
        method: the paper's method.
        record: name of the record that can tell.
        table: title of the record's table; "" if the record has no tables.
        text: the sentence, shortened.
        source: section, table or figure of the paper.
        comparisons: comparisons that must all hold.
        recorded: its rows are in the record alone: nothing offers one of the readings that it compares any longer.
    """

    method: str
    record: str
    table: str
    text: str
    source: str
    comparisons: tuple[Comparison, ...]
    recorded: bool = False


def _equal(better: Setting, worse: Setting, **more: Any) -> Comparison:
    """Compare rows that should be equally good, within two points and a hundredth of a nat."""
    return Comparison(better, worse, **{"points": 2.0, "nats": 0.01, **more})


_HARD = ("kv_retrieval", "niah_multikey_3")
_PAPER = {"variant": "sentences, mean query, r 2"}
_votes = functools.partial(Claim, "TokenSelect", "votes", "TokenSelect: how heads vote")
_reuse = functools.partial(Claim, "TokenSelect", "theta", "TokenSelect: the selection cache")
_chunk = functools.partial(Claim, "TokenSelect", "chunk", "TokenSelect: prompt tokens that share a selection")
_beyond = functools.partial(Claim, "TokenSelect", "extrapolate", "TokenSelect: beyond the trained length")
_sentences = functools.partial(Claim, "SentenceKV", "sentences", "SentenceKV: unit, query, pool, mode")
_budget = functools.partial(Claim, "CHESS", "chess", "CHESS: budget")
_trigger = functools.partial(Claim, "CHESS", "chess", "CHESS: when the page list is rebuilt")
_kinds = functools.partial(Claim, "MosaicKV", "strategy", "MosaicKV: which channels are kept")
_channels = functools.partial(Claim, "MosaicKV", "channels", "MosaicKV: channels and blocks")
_hashing = functools.partial(Claim, "ParisKV", "hashing", "ParisKV: rotation before hashing")
_drift = functools.partial(Claim, "ParisKV", "drift", "")

CLAIMS = (
    _votes(
        "Soft votes select better than hard votes, and hard votes better than the sum of logits.",
        "section 6.3, table 4",
        (Comparison({"vote": "soft"}, {"vote": "hard"}), Comparison({"vote": "hard"}, {"vote": "raw"})),
    ),
    _votes(
        "More selected tokens are better.",
        "section 6.3, table 5",
        (Comparison({"vote": "soft", "share": 1}, {"vote": "soft", "share": 8}),),
    ),
    _reuse(
        "Reuse of a selection down to a cosine of 0.9 costs nothing.",
        "appendix J, table 9",
        (_equal({"theta": 0.9}, {"theta": 2.0}),),
    ),
    _reuse(
        "At 0.5 hard retrieval breaks.", "section 6.3, figure 6", (Comparison({"theta": 0.9}, {"theta": 0.5}, tasks=_HARD),)
    ),
    _reuse(
        "At 0.5 an easy needle is still found.",
        "section 6.3, figure 6",
        (_equal({"theta": 0.5}, {"theta": 2.0}, tasks=("niah_single_2",), nats=None),),
    ),
    _chunk(
        "Queries that follow each other are alike, so the mean query of 512 prompt tokens selects for all.",
        "section 5.2",
        (_equal({"chunk": "paper"}, {"chunk": "sixteenth"}),),
    ),
    _beyond(
        "Beyond the window it is better than the model itself.",
        "section 6.2, tables 1 and 2",
        (Comparison({"method": "tokenselect"}, FULL),),
    ),
    _beyond(
        "Beyond the window it is better than StreamingLLM.",
        "section 6.2, tables 1 and 2",
        (Comparison({"method": "tokenselect"}, {"method": "streamingllm"}),),
    ),
    _sentences(
        "Sentences are better units than equal parts.", "section 6.1, table 3", (Comparison(_PAPER, {"variant": "chunks"}),)
    ),
    _sentences(
        "The mean query of the sentence is better than the current query.",
        "section 6.2, figure 6",
        (Comparison(_PAPER, {"variant": "current query"}),),
    ),
    _sentences(
        "More kept tokens than are attended (r above 1) are better.",
        "section 6.2, figure 6",
        (Comparison(_PAPER, {"variant": "r 1"}),),
    ),
    _sentences(
        "It is better than SnapKV, which attends to as many tokens.",
        "section 5.3, table 7",
        (Comparison(_PAPER, {"variant": "SnapKV"}),),
    ),
    _budget("At 1 % it is better than Full.", "section 5.2, table 1", (Comparison({"budget": 1}, FULL, nats=None),)),
    _budget(
        "The smallest budget is the best: 1 % is above 9 % and above 73 %.",
        "appendices C and E, table 3",
        (Comparison({"budget": 1}, {"budget": 9}), Comparison({"budget": 1}, {"budget": 73})),
    ),
    _trigger(
        "A list that is rebuilt when the model is unsure is better than one that is rebuilt every 6 pages.",
        "appendix C, figure 9",
        (Comparison({"trigger": "and"}, {"trigger": "every 6 pages"}),),
    ),
    _kinds(
        "Rotation helps channels that are the same for all vectors.",
        "section 6.2, figure 9",
        (Comparison({"kind": "rotated"}, {"kind": "uniform"}),),
        recorded=True,
    ),
    _kinds(
        "The largest channels of each vector are better than the same channels for all.",
        "section 6.2, figure 9",
        (Comparison({"kind": "per vector"}, {"kind": "rotated"}),),
        recorded=True,
    ),
    _kinds(
        "The dynamic strategy adds to it.",
        "section 6.2, figure 9",
        (Comparison({"kind": "dynamic"}, {"kind": "per vector"}),),
    ),
    _channels(
        "A quarter of the channels and a tenth of the tokens cost less than 5 points on RULER (1.9 to 3.6 in the paper).",
        "section 6.2, table 1",
        (Comparison({"channels": 0.25, "blocks": 0.1}, FULL, points=5.0, nats=None),),
    ),
    _hashing(
        "Keys are normalised and rotated before they are hashed: better than plain keys.",
        "section 5.3, figure 10",
        (Comparison({"rotate": True}, {"rotate": False}),),
    ),
    _hashing(
        "With k 100 it costs less than 2 points on RULER (0.6 in the paper).",
        "appendix D.1, table 6",
        (Comparison({"rotate": True, "part": 1}, FULL, points=2.0, nats=None),),
    ),
    _drift(
        "Analytic centroids of rotated keys find more of the best keys than centroids learned on the prompt.",
        "section 5.3, figure 10",
        (Comparison({"clusters": "rotated"}, {"clusters": "learned"}),),
    ),
    _drift(
        "Centroids learned on the prompt go stale: those learned again at the end find more.",
        "section 1, figure 1",
        (Comparison({"clusters": "relearned", "when": "last"}, {"clusters": "learned", "when": "last"}),),
    ),
    _drift(
        "Its recall does not fall along a generation.",
        "section 1, figure 1",
        (_equal({"clusters": "rotated", "when": "last"}, {"clusters": "rotated", "when": "first"}),),
    ),
)
