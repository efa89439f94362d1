"""Trains the byte-level BPE tokenizer of the built-in model: `python -m experiments.lab.training.tokenizer --out DIR`.

Numbers are cut into groups of three digits from the left (as Llama 3 does), and capital letters in a row into pairs. A uuid
is always 16 pairs of hexadecimal digits and 4 dashes, and a line break is a token of its own. So a number, a uuid or a
variable name has the same tokens everywhere, and two pieces that meet at a line break or before a space have the same tokens
as their concatenation.

Digits form groups because, if every digit were a token, the next digit of a value would be ambiguous after any digit that
occurred before. A small model with a token for every digit copied uuids (pairs) at 97-100 %, but seven-digit numbers at only
20-70 % (see MODEL_CARD.md).
"""

import dataclasses
import json
import pathlib
import random
import string
from collections.abc import Iterator, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.cli import Job, option
from experiments.tasks import PROMPTS, haystack, prose_text, singular_form, source_text, split_sentences

VOCAB_SIZE = 5120
END = "<|endoftext|>"
PAD = "<|pad|>"
MODEL_MAX_LENGTH = 32768
_HEX = "[0-9a-f]"
_UUID = rf"(?<![0-9A-Za-z]){_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}(?![0-9A-Za-z])"


def _pair_patterns() -> list[str]:
    """Return patterns that cut a piece that is exactly a uuid into pairs; they look ahead to the end of the piece."""
    front = rf"{_HEX}{{2}}(?=(?:{_HEX}{{2}}){{0,3}}-(?:{_HEX}{{4}}-){{0,3}}{_HEX}{{12}}\z)"
    back = [rf"(?<={_HEX}{{4}}-{_HEX}{{{2 * j}}}){_HEX}{{2}}(?={_HEX}{{{10 - 2 * j}}}\z)" for j in range(6)]
    return [front, *back]


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Return the splitting rules as data of the tokenizers library, so that no Python runs when a text is encoded."""
    rules = _pair_patterns() + [
        r"[0-9]{1,3}",
        r" ?VAR(?![A-Za-z])",
        r"[A-Z]{2}(?![a-z])|(?<=[A-Z])[A-Z](?![a-z])",
        r"'(?:s|t|re|ve|m|ll|d)(?![a-z])",
        r" ?(?![A-Z]{2})\p{L}\p{Ll}*",
        r"\n",
        r" ?[^\s\p{L}0-9]+",
        r"\s",
    ]
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_UUID), behavior="isolated"),
            pre_tokenizers.Split(Regex("|".join(rules)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def template_texts(repeats: int) -> Iterator[str]:
    """Yield the fixed texts of the tasks with empty placeholders, each ``repeats`` times."""
    niah, vt, passkey, digits, kv = (
        PROMPTS[name] for name in ("niah_single_1", "vt", "passkey", "number_string", "kv_retrieval")
    )
    templates = [  # in the order of the corpus from which the shipped tokenizer was trained
        *(niah.context, niah.question, niah.prefix, niah.forms["needle"]),
        *(vt.context, vt.question, vt.prefix),
        *(passkey.context, digits.context),
        *(text for one in (passkey, digits) for text in (one.forms["needle"], one.question, one.prefix)),
        *(kv.context, kv.prefix),
        haystack.NOISE,
        '\n\nKey: "": "", ',
        "VAR = VAR \n",
        '{"": "", "": ""}',
        "numbers number uuids uuid",
    ]
    blanks = {name: "" for name in ("kind", "context", "query", "key", "value", "count")}
    for text in templates:
        filled = text.format(**blanks) if "{" in text and '{"' not in text else text
        for _ in range(repeats):
            yield filled
            yield singular_form(filled)


def corpus(texts: Sequence[str]) -> Iterator[str]:
    """Yield the texts that the merges are learned from: prose, templates, and numbers and pairs that must become tokens."""
    for text in texts:
        yield from split_sentences(text)
    yield from template_texts(repeats=300)
    rng = random.Random(0)
    for _ in range(60_000):
        h = f"{rng.getrandbits(128):032x}"
        yield f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"
    every_number = "\n".join(f"{number:03d}" for number in range(1000))
    every_pair = "\n".join(a + b for a in string.ascii_uppercase for b in string.ascii_uppercase)
    for _ in range(3000):
        yield every_number
        yield every_pair


def train_tokenizer(texts: Sequence[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train the tokenizer.

    Args:
        texts: prose.
        vocab_size: entries, including the two special tokens.

    Returns:
        The tokenizer; id 0 is end-of-text, id 1 padding.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END, special=True), AddedToken(PAD, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(texts), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: pathlib.Path) -> None:
    """Write tokenizer.json and tokenizer_config.json in Hugging Face layout."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_MAX_LENGTH,
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class TokenizerCommand:
    """The texts that the tokenizer is trained on, and the directory that it is written to.

    Attributes:
        out: directory for tokenizer.json
        text: prose files besides pydoc_data
    """

    out: pathlib.Path = option()
    text: tuple[pathlib.Path, ...] = option((), several=True)


def _train(command: TokenizerCommand) -> None:
    texts = [source_text(f"file:{path}") for path in command.text]
    tokenizer = train_tokenizer([prose_text(), *texts])
    save_tokenizer(tokenizer, command.out)
    print(f"{tokenizer.get_vocab_size()} entries written to {command.out}")


main = Job(_train, TokenizerCommand)


if __name__ == "__main__":
    raise SystemExit(main())
