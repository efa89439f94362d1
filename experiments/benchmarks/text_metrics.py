"""Measures of two texts: token F1, ROUGE, repeated functions, HELMET's containment and NDCG.

Each measure gives the values of the suites' own programs, including odd roundings, so that scores can be compared with
published scores.
"""

import collections
import functools
import importlib
import json
import logging
import math
import re
import string
import types
import warnings
from collections.abc import Sequence

# LongBench's and InfiniteBench's list: ASCII marks and the marks of Chinese text.
_MARKS = set(
    string.punctuation
    + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､"
    + "、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


@functools.cache
def _package(name: str, pip_name: str) -> types.ModuleType:
    """Import an optional package; the error for an absent package names the extra that installs it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jieba's source has escapes that newer Pythons warn about
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this scorer needs the package {pip_name!r} ({error}); install the extra 'eval' (pip install 'kvjax[eval]')"
        ) from error


def chinese_words(text: str) -> list[str]:
    """Cut a Chinese text into words, as LongBench does (`jieba`, accurate mode); English words stay whole."""
    jieba = _package("jieba", "jieba")
    jieba.setLogLevel(logging.WARNING)  # it reports its dictionary on stderr otherwise
    return jieba.lcut(text)


def normalize_english(text: str) -> str:
    """Normalise a text as SQuAD does: lower case, no ASCII punctuation, no articles, single spaces."""
    kept = "".join(mark for mark in text.lower() if mark not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def normalize_chinese(text: str) -> str:
    """Lower the case of a text, and remove ASCII and Chinese punctuation and white space."""
    return "".join("".join(mark for mark in text.lower() if mark not in _MARKS).split())


def token_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Compute the harmonic mean of precision and recall of two bags of tokens; 0 if they share no token."""
    shared = sum((collections.Counter(prediction) & collections.Counter(reference)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, reference: str) -> float:
    """Compute LongBench's ROUGE-L: F of the package `rouge`, at summary level, with sentences that end at full stops."""
    scorer = _package("rouge", "rouge").Rouge(metrics=["rouge-l"])
    try:
        return scorer.get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):
        # Empty text, or a "sentence" of near a thousand words (the package recurses over them): LongBench counts 0.
        return 0.0


@functools.cache
def _google_rouge(kind: str, stem: bool):
    return _package("rouge_score.rouge_scorer", "rouge-score").RougeScorer([kind], use_stemmer=stem)


def google_rouge(prediction: str, references: Sequence[str], kind: str, stem: bool) -> float:
    """Compute F of the package `rouge-score`, the best over references.

    Args:
        references: reference texts.
        kind: "rouge1", "rougeL" or "rougeLsum" (sentences are lines).
        stem: whether words are reduced to their stems first.
    """
    return float(_google_rouge(kind, stem).score_multi(references, prediction)[kind].fmeasure)


def repeats_function(prediction: str, function: str, candidates: Sequence[str]) -> float:
    """Tell by RepoQA's measure whether the output repeats the wanted function, and no other of its repository.

    The least BLEU that counts is 0.8, as SCBench reports. RepoQA cuts the first function out of the output's code block with
    tree-sitter. Here the whole block counts, so other text around the function inside the block lowers the score.

    Args:
        function: the wanted function.
        candidates: all functions of the repository that questions ask for, with or without `function`.
    """
    bleu = _package("nltk.translate.bleu_score", "nltk")
    smoothing = bleu.SmoothingFunction().method4
    block = re.search(r"^```(?:\w+)?\s*\n(.*?)^```", prediction.strip(), re.DOTALL | re.MULTILINE)
    written = re.split(r"\s+", (block.group(1) if block else prediction).strip())

    def similarity(text: str) -> float:
        return float(bleu.sentence_bleu([re.split(r"\s+", text.strip())], written, smoothing_function=smoothing))

    asked = similarity(function)
    best = max((similarity(text) for text in candidates if text != function), default=0.0)
    return float(asked >= 0.8 and asked > best)


def contains_answer(prediction: str, answers: Sequence[str]) -> float:
    """Score 1.0 if the text holds a reference, without case, punctuation and articles, else 0.0."""
    text = normalize_english(prediction)
    return float(any(normalize_english(answer) in text for answer in answers))


def ranked_ids(prediction: str) -> list[str]:
    """Return the numbers of the longest chain ``3 > 1 > 2`` of a text, each once; brackets, colons and ``ID`` are ignored."""
    text = re.sub(r"[\[\]:]", "", prediction).lower().replace("id", "")
    chains = (match.group(0) for match in re.finditer(r"(\d+)(?:\s*>\s*(\d+))*", text))
    longest = max(chains, key=len, default="")
    return list(dict.fromkeys(part.strip() for part in longest.split(">") if part.strip().isdigit()))


def ndcg10(prediction: str, answers: Sequence[str]) -> float:
    """Compute NDCG at 10 of a ranking, as trec_eval does: a passage's relevance over the logarithm of its place.

    Args:
        prediction: the ranking.
        answers: the right ranking, and a JSON object of each passage's relevance.
    """
    relevance: dict[str, int] = json.loads(answers[1])

    def gain(values: Sequence[int]) -> float:
        return sum(value / math.log2(place + 1) for place, value in enumerate(values[:10], 1))

    best = gain(sorted(relevance.values(), reverse=True))
    return gain([relevance.get(number, 0) for number in ranked_ids(prediction)]) / best if best else 0.0
