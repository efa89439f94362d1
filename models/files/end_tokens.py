"""Tokens that end an answer and that no number in a model's files names: they are known by their text.

A file names one token, or some. A chat template may close a turn with another, and a text that runs on behind it is another
turn. The texts are those at which llama.cpp's loader ends (``src/llama-vocab.cpp``).
"""

from collections.abc import Mapping

_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "<end_of_utterance>",
)  # fmt: skip
_HARMONY = ("<|return|>", "<|call|>")  # of gpt-oss, whose <|end|> closes one message of several
_MESSAGE = "<|end|>"


def end_ids(ids: Mapping[str, int]) -> tuple[int, ...]:
    """List the ids of the tokens that end an answer by their text, among all tokens or the special ones: ``ids`` by text."""
    harmony = all(text in ids for text in _HARMONY)
    return tuple(ids[text] for text in (*_ENDS, *_HARMONY, *(() if harmony else (_MESSAGE,))) if text in ids)
