"""The tokenizer, the special tokens and the chat templates of a GGUF file."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from .reader import GGUFFile
from .sentencepiece import KINDS, sentencepiece
from .splits import SPLITS, Split

_MODEL = "tokenizer.ggml.model"
_BYTE_LEVEL = "gpt2"
_OTHER_MODELS = {"bert": "WordPiece", "rwkv": "RWKV"}
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type: special tokens, and texts that are never cut
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
    """Build the tokenizer of a file: byte-level BPE, or SentencePiece (`models.files.gguf.sentencepiece`)."""
    if file.metadata.get(_MODEL) in KINDS:
        tokenizer, begins = sentencepiece(file), True
    else:
        split = _split(file)
        tokenizer, begins = _byte_level(file, split), split.adds_bos
    kinds, tokens = (file.metadata.get(f"tokenizer.ggml.{key}", []) for key in ("token_type", "tokens"))
    for chosen, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        texts = [token for token, kind in zip(tokens, kinds, strict=False) if kind == chosen]
        add([AddedToken(token, normalized=False, special=chosen == _CONTROL) for token in texts])
    _frame(tokenizer, file, begins)
    return tokenizer


def _byte_level(file: GGUFFile, split: Split) -> Tokenizer:
    """Build a byte-level BPE tokenizer that cuts texts as ``split`` says."""
    absent = [key for key in ("tokens", "merges") if f"tokenizer.ggml.{key}" not in file.metadata]
    if absent:
        raise ValueError(f"{file.path}: the tokenizer lacks {', '.join(f'tokenizer.ggml.{key}' for key in absent)}")
    tokens = file.metadata["tokenizer.ggml.tokens"]
    merges = [
        (merge[:at], merge[at + 1 :]) for merge in file.metadata["tokenizer.ggml.merges"] for at in [merge.find(" ", 1)]
    ]
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
