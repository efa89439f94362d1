r"""How each kind of byte-level tokenizer cuts a text into words, before it merges the bytes of each word.

A GGUF file only names the kind, in ``tokenizer.ggml.pre``. llama.cpp (``llama-vocab.cpp``, function ``load``) states which
models a name stands for; the patterns come from the ``tokenizer.json`` of these models. Several patterns run one after the
other: each cuts the pieces of the previous pattern into its matches and the text between them.
"""

import dataclasses

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT, _THREE_DIGITS = r"\p{N}", r"[0-9][0-9][0-9]"


@dataclasses.dataclass(frozen=True)
class Split:
    """How a kind of tokenizer cuts texts.

    Attributes:
        patterns: the patterns, in the order in which they run.
        whole_words: whether a word that is a token stays whole, even if no merges lead to it.
        adds_bos: whether an encoded text begins with the begin-of-text token if the file does not state it.
        nfc: whether characters are composed first (Unicode NFC). Qwen's own tokenizer does so; llama.cpp does not.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    nfc: bool = False


_SPLITS = {
    Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)): ("default",),
    Split((_GPT2,)): ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "a.x-4.0", "mellum"),
    Split((_DIGIT, _GPT2)): (
        "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
    ),
    Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS)): ("falcon",),
    Split((_LLAMA3,), whole_words=True, adds_bos=True): (
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    ),
    Split((_LLAMA3,)): ("dbrx", "smaug-bpe"),
    Split((_QWEN2,), nfc=True): ("qwen2",),
    Split((_O200K,)): ("gpt-4o", "llama4", "kanana2"),
    Split((_QWEN2,)): ("deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo", "solar-open"),
    Split((_TEKKEN,), whole_words=True, adds_bos=True): ("tekken",),
    Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", _DIGIT)): ("deepseek-coder",),
}  # fmt: skip
SPLITS = {name: split for split, names in _SPLITS.items() for name in names}
