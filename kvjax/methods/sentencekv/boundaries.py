"""The tokens that end a sentence, as a table over the vocabulary."""

import re
from typing import Any

import numpy as np

MODES = ("robust", "code")
# A closing mark and behind it only spaces, quotes and closing brackets; or a blank line anywhere.
_END = re.compile(r"""[.!?。！？…][\s"'`“”„‟‘’«»‹›)\]}）］｝】〉》」』〕]*\Z|\n\s*\n""")
# The strings that SentenceKV's released code looks up.
_LISTED = (".", "!", "?", ". ", "! ", "? ", "...", "\n\n", "\n\n\n", "。", "！", "？", "。。")


def boundary_table(tokenizer: Any, vocab_size: int, mode: str = "robust") -> np.ndarray:
    """Mark the tokens that end a sentence, as its last token: SentenceKV's knob ``boundary``.

    Args:
        tokenizer: a ``tokenizers.Tokenizer`` or a Hugging Face tokenizer, with ``get_vocab()`` and ``decode([id])``.
        vocab_size: entries V of the model's vocabulary. Ids that the tokenizer does not have end no sentence.
        mode: ``"robust"``: the decoded text ends with one of ``. ! ? 。 ！ ？ …``, not counting spaces, quotes and
            closing brackets behind it, or it contains a blank line. ``"code"``: the token, as the vocabulary spells it, is
            one of the 13 strings of the released code. A byte-level vocabulary spells most of them differently.

    Returns:
        bool [V].

    Raises:
        ValueError: unknown mode, or a vocab_size below 1.
    """
    if mode not in MODES:
        raise ValueError(f"boundary_table: mode must be one of {', '.join(MODES)}, got {mode!r}")
    if vocab_size < 1:
        raise ValueError(f"boundary_table: vocab_size must be at least 1 token, got {vocab_size}")
    table = np.zeros(vocab_size, bool)
    vocabulary = tokenizer.get_vocab()
    if mode == "code":
        ids = [vocabulary[text] for text in _LISTED if text in vocabulary]
    else:
        ids = [token for token in vocabulary.values() if token < vocab_size and _END.search(tokenizer.decode([token]))]
    table[[token for token in ids if token < vocab_size]] = True
    return table
