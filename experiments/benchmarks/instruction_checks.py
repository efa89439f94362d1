"""IFEval's 25 kinds of checkable instructions (Zhou et al. 2023, arXiv:2311.07911): whether a response follows each.

Source: google-research @4c42994, `instruction_following_eval/instructions.py`. Three kinds need packages and data there that
are not needed here, so their values may differ for some responses:

* sentences (`number_sentences`) end at a full stop, question or exclamation mark before white space. NLTK's model knows more
  abbreviations than the list here.
* words in capitals (`capital_word_frequency`) are cut at punctuation, not by NLTK's tokenizer.
* a language (`response_language`, and English in `english_capital` and `english_lowercase`) is told from the script of its
  letters; languages in Latin letters from their most frequent words. Languages of one other script are not told apart (Hindi,
  Marathi and Nepali; Arabic, Persian and Urdu; Russian and Bulgarian). The suite asks the package langdetect.
"""

from __future__ import annotations

import collections
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No|Inc|Jr|Sr)|\b[A-Za-z])\.$")
_SCRIPTS = {
    "ARABIC": ("ar", "fa", "ur"), "DEVANAGARI": ("hi", "mr", "ne"), "BENGALI": ("bn",), "GURMUKHI": ("pa",),
    "GUJARATI": ("gu",), "TAMIL": ("ta",), "TELUGU": ("te",), "KANNADA": ("kn",), "MALAYALAM": ("ml",), "THAI": ("th",),
    "CYRILLIC": ("ru", "bg", "uk", "mk"), "HANGUL": ("ko",), "HIRAGANA": ("ja",), "KATAKANA": ("ja",),
    "CJK": ("zh-cn", "zh-tw", "zh", "ja"), "GREEK": ("el",), "HEBREW": ("he",),
}  # fmt: skip
_FREQUENT = {
    "en": "the and of to in is that it for you with are this on be as i not have was",
    "de": "der die und das ist nicht ein eine zu mit ich den auf es sich für von dem wir",
    "es": "el la de que y los en un por con no una las es del se para lo su",
    "fr": "le la les de et des est une dans pour que en qui je pas vous il ce",
    "it": "il di che e la per un non sono una del in è con le si da mi",
    "pt": "o de que e do da em um para não uma os com é as se por mais",
    "fi": "ja on ei se että ovat oli myös kun hän mutta tai olen voi ole",
    "sw": "ya na wa kwa ni katika za la hii watu wao kama hivyo yake cha",
    "vi": "và của là có cho không được một các người trong với những tôi để",
}
_COMMON = {name: frozenset(words.split()) for name, words in _FREQUENT.items()}
Arguments = Mapping[str, Any]


def _compares(count: int, relation: str, wanted: int) -> bool:
    return count < wanted if relation == "less than" else count >= wanted


def speaks(text: str, language: str) -> bool:
    """Tell whether a text is in a language, given by its code; a text without letters counts as right, as in the suite."""
    scripts = collections.Counter(
        unicodedata.name(letter, "?").partition(" ")[0] for letter in text if letter.isalpha()
    )
    if not scripts:
        return True
    script = scripts.most_common(1)[0][0]
    if script != "LATIN":
        return language in _SCRIPTS.get(script, ())
    words = re.findall(r"\w+", text.lower())
    hits = {name: sum(word in common for word in words) for name, common in _COMMON.items()}
    return language == max(hits, key=lambda name: hits[name]) and hits[language] > 0


def count_sentences(text: str) -> int:
    """Count the sentences of a text."""
    parts = re.split(r"(?<=[.!?])[\"')\]*]*\s+", text.strip())
    sentences, pending = 0, ""
    for part in parts:
        pending = f"{pending} {part}" if pending else part
        if _ABBREVIATION.search(pending):
            continue
        sentences += any(map(str.isalnum, pending))
        pending = ""
    return sentences + any(map(str.isalnum, pending))


def _capital_words(text: str) -> int:
    return sum(word.isupper() for word in re.findall(r"[^\W_](?:[\w.&/-]*[^\W_])?", text))


def _highlights(text: str) -> int:
    single = (found.strip("*").strip() for found in re.findall(r"\*[^\n*]*\*", text))
    double = (found[2:-2].strip() for found in re.findall(r"\*\*[^\n*]*\*\*", text))
    return sum(map(bool, single)) + sum(map(bool, double))


def _paragraphs(text: str, given: Arguments) -> bool:
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[1:-1]
    count = len(parts) - (not parts[0]) - (len(parts) > 1 and not parts[-1])
    return all(inner) and count == given["num_paragraphs"]


def _first_word(text: str, given: Arguments) -> bool:
    parts = text.split("\n\n")
    count, nth = sum(bool(part.strip()) for part in parts), given["nth_paragraph"]
    if nth > count or not (paragraph := parts[nth - 1].strip()):
        return False
    word = re.split(r"[.,?!'\"]", paragraph.split()[0].lstrip("'").lstrip('"'))[0]
    return count == given["num_paragraphs"] and word.lower() == given["first_word"].lower()


def _postscript(text: str, given: Arguments) -> bool:
    marker = given["postscript_marker"].strip()
    forms = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    return re.search(forms.get(marker, rf"\s*{marker.lower()}.*$"), text.lower(), re.MULTILINE) is not None


def _bullets(text: str, given: Arguments) -> bool:
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == given["num_bullets"]


def _json(text: str) -> bool:
    text = text.strip()
    for opening in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(opening)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    said = [part for part in parts if part]
    return all(parts[1:-1]) and len(said) == 2 and said[0] != said[1]


def _title(text: str) -> bool:
    return any(found.lstrip("<").rstrip(">").strip() for found in re.findall(r"<<[^\n]+>>", text))


def _found(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.IGNORECASE))


# The check of each kind, and the arguments that it needs.
CHECKS: dict[str, tuple[Callable[[str, Arguments], bool], tuple[str, ...]]] = {
    "keywords:existence": (lambda text, given: all(_found(word, text) for word in given["keywords"]), ("keywords",)),
    "keywords:frequency": (
        lambda text, given: _compares(_found(given["keyword"].strip(), text), given["relation"], given["frequency"]),
        ("keyword", "relation", "frequency"),
    ),
    "keywords:forbidden_words": (
        lambda text, given: not any(_found(rf"\b{word}\b", text) for word in given["forbidden_words"]),
        ("forbidden_words",),
    ),
    "keywords:letter_frequency": (
        lambda text, given: _compares(
            text.lower().count(given["letter"].lower()), given["let_relation"], given["let_frequency"]
        ),
        ("letter", "let_relation", "let_frequency"),
    ),
    "language:response_language": (lambda text, given: speaks(text, given["language"]), ("language",)),
    "length_constraints:number_sentences": (
        lambda text, given: _compares(count_sentences(text), given["relation"], given["num_sentences"]),
        ("relation", "num_sentences"),
    ),
    "length_constraints:number_paragraphs": (_paragraphs, ("num_paragraphs",)),
    "length_constraints:number_words": (
        lambda text, given: _compares(len(re.findall(r"\w+", text)), given["relation"], given["num_words"]),
        ("relation", "num_words"),
    ),
    "length_constraints:nth_paragraph_first_word": (_first_word, ("num_paragraphs", "nth_paragraph", "first_word")),
    "detectable_content:number_placeholders": (
        lambda text, given: len(re.findall(r"\[.*?\]", text)) >= given["num_placeholders"],
        ("num_placeholders",),
    ),
    "detectable_content:postscript": (_postscript, ("postscript_marker",)),
    "detectable_format:number_bullet_lists": (_bullets, ("num_bullets",)),
    "detectable_format:constrained_response": (lambda text, given: any(x in text.strip() for x in _CONSTRAINED), ()),
    "detectable_format:number_highlighted_sections": (
        lambda text, given: _highlights(text) >= given["num_highlights"], ("num_highlights",)
    ),
    "detectable_format:multiple_sections": (
        lambda text, given: (
            len(re.split(rf"\s?{given['section_spliter'].strip()}\s?\d+\s?", text)) - 1 >= given["num_sections"]
        ),
        ("section_spliter", "num_sections"),
    ),
    "detectable_format:json_format": (lambda text, given: _json(text), ()),
    "detectable_format:title": (lambda text, given: _title(text), ()),
    "combination:two_responses": (lambda text, given: _two_responses(text), ()),
    "combination:repeat_prompt": (
        lambda text, given: text.strip().lower().startswith(given["prompt_to_repeat"].strip().lower()),
        ("prompt_to_repeat",),
    ),
    "startend:end_checker": (
        lambda text, given: text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower()),
        ("end_phrase",),
    ),
    "startend:quotation": (
        lambda text, given: len(text.strip()) > 1 and text.strip()[0] == '"' == text.strip()[-1], ()
    ),
    "change_case:capital_word_frequency": (
        lambda text, given: _compares(_capital_words(text), given["capital_relation"], given["capital_frequency"]),
        ("capital_relation", "capital_frequency"),
    ),
    "change_case:english_capital": (lambda text, given: text.isupper() and speaks(text, "en"), ()),
    "change_case:english_lowercase": (lambda text, given: text.islower() and speaks(text, "en"), ()),
    "punctuation:no_comma": (lambda text, given: "," not in text, ()),
}  # fmt: skip


def follows(response: str, instruction: str) -> bool:
    """Tell whether a response follows an instruction, strictly; a blank response follows none.

    Args:
        response: the text of a model.
        instruction: a JSON object with the suite's "id" and the "kwargs" of the instruction.
    """
    told = json.loads(instruction)
    return bool(response.strip()) and CHECKS[told["id"]][0](response, told["kwargs"])


def follows_loosely(response: str, instruction: str) -> bool:
    """Tell whether a response follows an instruction in one of the suite's eight variants.

    The variants leave out the first line, the last, or both, and then also all asterisks.
    """
    lines = response.split("\n")
    cut = ("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))
    variants = [response, *cut]
    return any(follows(text, instruction) for text in (*variants, *(text.replace("*", "") for text in variants)))
