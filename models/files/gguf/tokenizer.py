"""The tokenizer, the special tokens and the chat templates of a GGUF file."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram

from .reader import GGUFFile
from .splits import SPLITS, Split

_MODEL = "tokenizer.ggml.model"
_BYTE_LEVEL = "gpt2"
_OTHER_MODELS = {"bert": "WordPiece", "rwkv": "RWKV"}
_PIECES = ("llama", "t5")  # kinds of SentencePiece
_SPACE = "\u2581"  # of SentencePiece
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # values of tokenizer.ggml.token_type; a text of the third is never cut
_NAMED = {  # name in chat templates -> name in the metadata
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # spelled so in the format
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer of a file: byte-level BPE, or SentencePiece."""
    if file.metadata.get(_MODEL) in _PIECES:
        tokenizer, begins = _sentencepiece(file), True
    else:
        split = _split(file)
        tokenizer, begins = _byte_level(file, split), split.adds_bos
    kinds, tokens = (file.metadata.get(f"tokenizer.ggml.{key}", []) for key in ("token_type", "tokens"))
    for chosen, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        texts = [token for token, kind in zip(tokens, kinds, strict=False) if kind == chosen]
        add([AddedToken(token, normalized=False, special=chosen == _CONTROL) for token in texts])
    _frame(tokenizer, file, begins)
    return tokenizer


def _declared(file: GGUFFile, *names: str) -> list[Any]:
    """Return what the metadata have of the tokenizer under these names."""
    keys = [f"tokenizer.ggml.{name}" for name in names]
    if absent := [key for key in keys if key not in file.metadata]:
        raise ValueError(f"{file.path}: the tokenizer lacks {', '.join(absent)}")
    return [file.metadata[key] for key in keys]


def _byte_level(file: GGUFFile, split: Split) -> Tokenizer:
    """Build a byte-level BPE tokenizer that cuts texts as ``split`` says."""
    tokens, joined = _declared(file, "tokens", "merges")
    merges = [(merge[:at], merge[at + 1 :]) for merge in joined for at in [merge.find(" ", 1)]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(
            f"{file.path}: the tokenizer repeats tokens: got {len(vocabulary)} different ones, expected {len(tokens)}"
        )
    try:
        tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=split.whole_words))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{file.path}: the tokenizer's merges do not fit its tokens: {error}") from error
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    """Build a SentencePiece tokenizer, of byte-pair encoding ("llama") or unigram ("t5"), without its special tokens.

    A file has the pieces and their scores. Pairs are merged in the order of the merged pieces' scores, and a text that no
    piece covers becomes pieces of single bytes, if there are such pieces. A space is the character U+2581.

    Sources: llama.cpp's ``llama-vocab.cpp``; Kudo and Richardson (arXiv:1808.06226); the order of equal scores as in the
    conversion of SentencePiece models in transformers 5.24.
    """
    tokens, scores, kinds = _declared(file, "tokens", "scores", "token_type")
    numbers = isinstance(scores, list) and all(type(score) is float for score in scores)
    if not numbers or not len(tokens) == len(scores) == len(kinds) or len(set(tokens)) < len(tokens):
        raise ValueError(
            f"{file.path}: the tokenizer must have a score and a type for each of {len(tokens)} different tokens"
        )
    has_bytes = _BYTE in kinds
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    if file.metadata["tokenizer.ggml.model"] == "llama":
        vocabulary = {token: at for at, token in enumerate(tokens)}
        model = BPE(vocabulary, _merges(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    else:
        at = None if unknown is None else tokens.index(unknown)
        model = Unigram(list(zip(tokens, scores, strict=True)), at, has_bytes)
    tokenizer = Tokenizer(model)
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    if file.metadata["tokenizer.ggml.model"] == "t5":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(_SPACE, "merged_with_next")
    joined: list = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*joined, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """List the pairs of pieces that are a piece together, the pair of the highest score first."""
    ids = {token: at for at, token in enumerate(tokens)}
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in ids and token[at:] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        ranked += [(pair, score) for pair in pairs]
    ranked.sort(key=lambda each: (each[1], len(each[0][0]), len(each[0][1])), reverse=True)
    return [pair for pair, _ in ranked]


def special_tokens(file: GGUFFile) -> dict[str, str]:
    """Return the special tokens that the metadata names, for example {"bos_token": "<s>", "eos_token": "</s>"}.

    Raises:
        ValueError: an id lies outside of the vocabulary.
    """
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    named = {}
    for name, key in _NAMED.items():
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            raise ValueError(f"{file.path}: tokenizer.ggml.{key}_token_id must be an id of {len(tokens)} tokens, got {index}")
        named[name] = tokens[index]
    return named


def chat_templates(file: GGUFFile) -> dict[str, str]:
    """Return the chat templates by name; the usual template is named "default"."""
    names = file.metadata.get("tokenizer.chat_templates", [])
    keys = {"default": "tokenizer.chat_template", **{name: f"tokenizer.chat_template.{name}" for name in names}}
    return {name: file.metadata[key] for name, key in keys.items() if file.metadata.get(key)}


def _split(file: GGUFFile) -> Split:
    """Return the rule by which the file's tokenizer cuts texts."""
    model = file.metadata.get(_MODEL)
    if model is None:
        raise ValueError(f"{file.path} has no tokenizer: it lacks {_MODEL}")
    if model != _BYTE_LEVEL:
        known = f" ({_OTHER_MODELS[model]})" if model in _OTHER_MODELS else ""
        raise ValueError(
            f"{file.path}: unsupported tokenizer model {model!r}{known}, expected {_BYTE_LEVEL!r} (byte-level BPE), "
            "'llama' or 't5' (SentencePiece)"
        )
    kind = file.metadata.get("tokenizer.ggml.pre", "default")
    if kind not in SPLITS:
        raise ValueError(f"{file.path}: unsupported tokenizer.ggml.pre {kind!r}, expected one of {', '.join(sorted(SPLITS))}")
    return SPLITS[kind]


def _frame(tokenizer: Tokenizer, file: GGUFFile, begins: bool) -> None:
    """Let encoded texts begin and end with the tokens that the file asks for."""
    named = special_tokens(file)

    def frame(name: str, default: bool) -> list[str]:
        return [named[name]] if file.metadata.get(f"tokenizer.ggml.add_{name}", default) and name in named else []

    before, after = frame("bos_token", begins), frame("eos_token", False)
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(before + after)],
        )
