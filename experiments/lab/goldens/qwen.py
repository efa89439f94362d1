"""Golden outputs of transformers for the named Qwen2.5-Coder models: token ids, chat prompts, weights and logits.

Run with torch, transformers, accelerate and gguf installed; the arguments are the GGUF files::

    python -m experiments.lab.goldens.qwen qwen2.5-coder-0.5b=0.5b.gguf qwen2.5-coder-1.5b=1.5b.gguf

The larger file needs 16 GB of memory for a while. The script writes ``qwen.json`` beside itself:

* ``texts`` and ``ids``: 300 texts and their token ids. They come from transformers' class ``Qwen2Tokenizer`` with the file's
  vocabulary and merges, and with the added tokens that Qwen's ``tokenizer_config.json`` lists. transformers' own reading of
  a tokenizer in a GGUF file leaves out the class's normaliser (NFC), so its ids differ on decomposed characters;
* ``tokens``, ``real`` and ``merges``: a small tokenizer that gives the same ids. It holds the single bytes, the added tokens,
  and the merges that the texts need, in their order; ``real`` are the ids of its tokens in the whole vocabulary;
* ``models``: for each model its file's sha256 and chat template, ``prompts`` of the conversations, ``sums`` (digests of
  the weights that transformers reads from the file, rounded to bfloat16, in alphabetical order of their names), and for a
  prompt of 1,024 ``tokens`` at 32 ``positions``: the 20 ``best`` tokens with their ``logits``, and ``moments`` of all
  logits: mean, standard deviation, logarithm of the sum of exponentials, and the product with a fixed random vector.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer
from tokenizers import models as tokenizer_models

from experiments.lab.goldens import FOLDER

HERE = FOLDER / "models" / "gguf"
SEED = 20261126
LENGTH, POSITIONS, BEST = 1024, 32, 20
SPECIAL = (  # as in Qwen's tokenizer_config.json; the first has the id 151643
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
ADDED = (  # also never cut, but no special tokens there; llama.cpp marks all with <| as special in the file
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>",
)  # fmt: skip
WORDS = (
    "the of and in to it was that he she they we're don't isn't I'll you've CAN'T it's O'Neill quick brown fox river "
    "mountain Yesterday evening, however; although (perhaps) \"quoted\" 'single' well-known e.g. U.S. Dr. café naïve "
    "résumé coöperate façade — – … antidisestablishmentarianism Pneumonoultramicroscopic internationalisation"
).split(" ")
NAMES = "i n self value get_item HTTPServer _private __init__ maxLen x1 MAX_SIZE fooBar2baz données 变量 λ".split(" ")
CODE = (
    "def {0}({1}, *args, {2}=None):\n    return {1}[{3}:{4}] + {2}\n",
    "for (int {0} = {3}; {0} < {4}; ++{0}) {{\n\t{1}->{2}[{0}] *= 0x{3:x};\n}}\n",
    "const {0} = async ({1}) => {{ await {2}(`${{{1}}}-{3}`); }};",
    "SELECT {0}, COUNT(*) FROM {1} WHERE {2} >= {3} GROUP BY {0} LIMIT {4};",
    "\t\tif {0} != nil && {1}.{2}() <= {3} {{ // {4}\r\n\t\t}}\r\n",
    '<div class="{0}" id="{1}-{3}">{2} &amp; {4}</div>\n\n',
    "class {0}(Base):\n    '''{1}'''\n\n    {2}: int = {3}  # noqa: E{4}\n",
    "#include <{0}.h>\n#define {1}(a,b) ((a)<(b)?{3}:{4})\n/* {2} */",
    "fn {0}<'a>({1}: &'a [u8]) -> Option<&'a {2}> {{ Some({1}[{3}..={4}]) }}",
    '{{"{0}": [{3}, -{4}.5e-3, null], "{1}": {{"{2}": true}}}}',
)
SCRIPTS = (  # first and last letter
    ("а", "я"), ("α", "ω"), ("א", "ת"), ("ا", "ي"), ("अ", "ह"), ("ก", "ฮ"), ("ぁ", "ん"), ("ァ", "ヶ"), ("一", "鿿"),
    ("가", "힣"), ("ᄀ", "ᇿ"), ("à", "ÿ"), ("̀", "ͯ"), ("Ḁ", "ỹ"), ("①", "⑳"), ("０", "ｚ"), ("😀", "🙏"), ("𝐀", "𝟿"),
    ("←", "⇿"),
)  # fmt: skip
APART = ("e\u0301", "u\u0308", "n\u0303", "A\u030a", "o\u0302\u0323", "\u1100\u1161\u11a8", "\u212b", "\u2126", "ﬁ")
NUMBERS = (
    "{}", "{:,}", "{:.3f}", "{:x}", "{:e}", "${:,.2f}", "-{}%", "v{}.0.1", "{}:30", "²{}³", "½{}", "٣{}۴", "{}th", " {} ",
)  # fmt: skip
SPACES = (
    " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n ", "\u00a0", "\u3000", "\u200b", "\u200d", "\v", "\f", "\x85",
)  # fmt: skip
CUT = (
    "<|im_start", "im_end|>", "<|", "|>", "<|im_start|", "< |im_end|>", "<tool_call", "<|IM_END|>", "[PAD151665]", "<think>",
)  # fmt: skip
CONVERSATIONS = (  # messages, and arguments of apply_chat_template
    ([{"role": "user", "content": "Hi"}], {"add_generation_prompt": True}),
    ([{"role": "user", "content": " What is\n\n2 + 2?  "}], {"add_generation_prompt": False}),
    (
        [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "Where is Paris?"}],
        {"add_generation_prompt": True},
    ),
    ([{"role": "system", "content": ""}, {"role": "user", "content": "你好，世界 👋"}], {"add_generation_prompt": True}),
    (
        [
            {"role": "user", "content": "def f(x):\n\treturn {'a': x}"},
            {"role": "assistant", "content": "It's <b>fine</b>."},
            {"role": "system", "content": "Late rules."}, {"role": "user", "content": "Again <|im_end|> \\n"},
        ],
        {"add_generation_prompt": True},
    ),
    (
        [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two, "}],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    (
        [
            {"role": "user", "content": "Weather in Zürich?"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}},
                {"type": "function", "function": {"name": "clock", "arguments": {}}},
            ]},
            {"role": "tool", "content": "{\"sky\": \"clear\"}"}, {"role": "tool", "content": "12:00"},
        ],
        {"add_generation_prompt": True, "tools": [{"type": "function", "function": {
            "name": "weather", "description": "The weather's forecast <now>", "parameters": {
                "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        }}]},
    ),
)  # fmt: skip


def texts() -> list[str]:
    """300 texts: 50 each of prose, code, letters of all scripts, numbers, white space, and special tokens within text."""
    draw = random.Random(SEED)

    def some(choices: tuple | list, least: int, most: int, between: str = " ") -> str:
        return between.join(draw.choice(choices) for _ in range(draw.randint(least, most)))

    def prose() -> str:
        return some(WORDS, 1, 20) + draw.choice([".", "!", "?!", "...", "\n", ""])

    def code() -> str:
        names = [draw.choice(NAMES) for _ in range(3)]
        return draw.choice(CODE).format(*names, draw.randrange(300), draw.randrange(10**5))

    def letters() -> str:
        words = []
        for _ in range(draw.randint(1, 5)):
            first, last = draw.choice(SCRIPTS)
            words.append("".join(chr(draw.randint(ord(first), ord(last))) for _ in range(draw.randint(1, 6))))
            words.append(draw.choice([*APART, "a", "", " "]))
        return draw.choice(["", " "]).join(words)

    def numbers() -> str:
        return some([draw.choice(NUMBERS).format(draw.randrange(10 ** draw.randint(1, 12))) for _ in range(6)], 1, 6)

    def spaces() -> str:
        return some([*SPACES * 2, *WORDS[:6], *NAMES[:6], "}", "7"], 1, 16, "")

    def tokens() -> str:
        return some([*SPECIAL, *ADDED, *CUT, *WORDS[:8], "user\n", "system", "\n", " ", "42"], 1, 9, draw.choice(["", " "]))

    kinds: list[Callable[[], str]] = [prose, code, letters, numbers, spaces, tokens]
    found = ["", " "]
    while len(found) < 300:
        text = kinds[len(found) % 6]()
        if text not in found:
            found.append(text)
    return found


def reference(path: Path) -> transformers.PreTrainedTokenizerFast:
    """Transformers' tokenizer of the class that Qwen's files name, with the vocabulary and merges of a GGUF file."""
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = json.loads(theirs.backend_tokenizer.to_str())["model"]
    tokenizer = transformers.Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(text, normalized=False) for text in SPECIAL[1:]]})
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    assert [tokenizer.convert_tokens_to_ids(text) for text in SPECIAL + ADDED] == list(range(151643, 151665))
    tokenizer.chat_template = theirs.chat_template
    return tokenizer


def small(tokenizer: Tokenizer, words: list[str]) -> dict:
    """The part of a tokenizer that ``words`` need. A merge that no word makes changes nothing, so it can be left out."""
    model = json.loads(tokenizer.to_str())["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    made = set()
    for word in words:
        symbols = list(word)
        while len(symbols) > 1:
            rank, at = min((ranks.get(pair, len(ranks)), at) for at, pair in enumerate(itertools.pairwise(symbols)))
            if rank == len(ranks):
                break
            made.add(symbols[at] + " " + symbols[at + 1])
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    merges = sorted(made, key=lambda pair: ranks[tuple(pair.split(" "))])
    kept = {token for token in model["vocab"] if len(token) == 1} | {merge.replace(" ", "") for merge in merges}
    tokens = [*sorted(kept, key=model["vocab"].get), *SPECIAL, *ADDED]
    return {"tokens": tokens, "real": [tokenizer.token_to_id(token) for token in tokens], "merges": merges}


def tokens(tokenizer: Tokenizer) -> dict:
    """The texts, their ids, and the small tokenizer, which is checked."""
    found = texts()
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in found]
    words = []
    for text in found:  # the pieces between added tokens are normalised and cut on their own
        for token in SPECIAL + ADDED:
            text = text.replace(token, "\0")
        for piece in text.split("\0"):
            pieces = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(piece))
            words += [word for word, _ in pieces]
    kept = small(tokenizer, words)
    state = json.loads(tokenizer.to_str())
    vocabulary = {token: at for at, token in enumerate(kept["tokens"])}
    again = Tokenizer(tokenizer_models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in kept["merges"]]))
    again.normalizer, again.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    again.add_tokens([AddedToken(token["content"], normalized=False) for token in state["added_tokens"]])
    for text, expected in zip(found, ids, strict=True):
        assert [kept["real"][at] for at in again.encode(text, add_special_tokens=False).ids] == expected, text
    return {"texts": found, "ids": ids, **kept}


def sums(model: torch.nn.Module) -> str:
    """The first 8 digits of the sha256 of every parameter's bfloat16 bytes, in order of the names."""
    found = []
    for _, value in sorted(model.named_parameters()):
        halves = value.detach().to(torch.bfloat16).contiguous().view(torch.uint8)
        found.append(hashlib.sha256(halves.numpy().tobytes()).hexdigest()[:8])
    return " ".join(found)


def moments(logits: torch.Tensor) -> list[list[float]]:
    """Of each row of [N, V]: mean, standard deviation, log-sum-exp, and the product with a fixed vector of signs."""
    signs = np.random.RandomState(SEED).randint(0, 2, logits.shape[-1]) * 2.0 - 1.0  # a generator that never changes
    rows = logits.double()
    columns = [rows.mean(-1), rows.std(-1, correction=0), rows.logsumexp(-1), rows @ torch.from_numpy(signs) / len(signs)]
    return [[round(value, 7) for value in row] for row in torch.stack(columns, -1).tolist()]


def outputs(path: Path, tokenizer: transformers.PreTrainedTokenizerFast) -> dict:
    """What transformers reads from and computes with one file, in float32, with weights rounded to bfloat16."""
    script = Path(__file__).with_name("gguf_files.py").read_text(encoding="utf-8")
    asked = [{"role": "user", "content": "Explain this program:\n\n" + script}]
    ids = tokenizer.encode(tokenizer.apply_chat_template(asked, tokenize=False), add_special_tokens=False)[:LENGTH]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    gc.collect()
    at = list(range(LENGTH // POSITIONS - 1, LENGTH, LENGTH // POSITIONS))
    with torch.no_grad():
        for value in model.parameters():  # the weights that a converted directory holds
            value.copy_(value.to(torch.bfloat16))
        hidden = model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[0, at])
    best = torch.topk(logits, BEST)
    return {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "tied": model.config.tie_word_embeddings,
        "template": tokenizer.chat_template,
        "prompts": [
            tokenizer.apply_chat_template(messages, tokenize=False, **options) for messages, options in CONVERSATIONS
        ],
        "sums": sums(model),
        "tokens": ids,
        "positions": at,
        "best": best.indices.tolist(),
        "logits": [[round(value, 5) for value in row] for row in best.values.tolist()],
        "moments": moments(logits),
    }


def main() -> None:
    """Write ``qwen.json`` beside this script."""
    found: dict = {"conversations": CONVERSATIONS, "models": {}}
    for argument in sys.argv[1:]:
        name, _, path = argument.partition("=")
        tokenizer = reference(Path(path))
        mine = tokens(tokenizer.backend_tokenizer)
        assert found.get("ids", mine["ids"]) == mine["ids"], "both models have Qwen's tokenizer"
        found |= mine
        found["models"][name] = outputs(Path(path), tokenizer)
    path = HERE / "qwen.json"
    path.write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
