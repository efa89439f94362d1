"""Readers of GSM8K, MATH-500, AIME, IFEval, LongProc and HELMET, and their scorers beside the suites' programs."""

from __future__ import annotations

import importlib
import json
import re
import sys
import types

import pytest

from experiments.benchmarks import READERS, Example, measures, read, score
from experiments.benchmarks import instruction_checks as checks
from experiments.benchmarks.countdown import demonstration, search_share, solves
from experiments.benchmarks.helmet_scores import ndcg10, ranked_ids
from experiments.benchmarks.math_answers import final_formula, last_number, same_formula
from experiments.benchmarks.scorers import MEASURES, SCORERS


def write(path, *records, listed=False):
    text = json.dumps(list(records)) if listed else "\n".join(map(json.dumps, records))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_every_scorer_of_more_measures_is_a_scorer():
    assert set(MEASURES) < set(SCORERS) and {"gsm8k", "ifeval", "helmet", "longproc"} < set(READERS)


# ---- mathematics --------------------------------------------------------------------------------------------------


def test_problems_of_mathematics_become_prompts_with_a_box(tmp_path):
    problem = {"question": "How many eggs?", "answer": "She has <<2*9=18>>18 eggs.\n#### 1,018"}
    (made,) = read(f"gsm8k:{write(tmp_path / 'test.jsonl', problem)}")
    assert made.prompt == (
        "How many eggs?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    ) and made.answers == ("1018",)  # fmt: skip
    texts = ["It is \\boxed{1018}.", "She makes $1,018.", "#### 1018", "18", ""]
    assert [score(made, text) for text in texts] == [1, 1, 1, 0, 0]
    assert [measures(made, text)["marked"] for text in texts] == [0, 0, 1, 0, 0]
    with pytest.raises(ValueError, match="line 1: expected '#### NUMBER' at the end of the field 'answer', got 'no'"):
        read(f"gsm8k:{write(tmp_path / 'bad.jsonl', {'question': 'q', 'answer': 'no'})}")

    problem = {"problem": "Half?", "solution": "s", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 3}
    (made,) = read(f"math500:{write(tmp_path / 'math.jsonl', problem)}")
    assert made.labels == {"subject": "Algebra", "level": 3} and made.max_new_tokens == 4096
    assert [score(made, text) for text in ("\\boxed{\\dfrac12}", "\\boxed{0.5}", "$1/2$", "\\boxed{2}")] == [1, 1, 1, 0]

    (made,) = read(f"aime:{write(tmp_path / 'aime2024.json', {'ID': '1', 'Problem': 'P?', 'Answer': 25}, listed=True)}")
    assert (made.task, made.context, made.answers) == ("aime/aime2024", "P?", ("25",))
    texts = ["so \\boxed{025}", "\\boxed{25}", "25", "$25$", "\\boxed{24} 25"]
    assert [score(made, text) for text in texts] == [1, 1, 1, 1, 0]
    with pytest.raises(ValueError, match="expected a field 'problem' or 'question', got the fields"):
        read(f"aime:{write(tmp_path / 'bad.json', {'answer': 1}, listed=True)}")


ANSWERS = [
    "So \\boxed{\\frac{3}{4}} it is", "$x = 5$ and $y=7$", "\\boxed 7$ end", "no box", "\\fbox{3}", "\\boxed{a{b}c}",
    "\\boxed{3", "\\boxed{\\text{ cm}}", "a $3$", "", "\\boxed{1}\\boxed{2}", "first $\\frac12$",
]  # fmt: skip
FORMULAS = [
    "\\frac12", "\\frac{1}{2}", "\\dfrac{1}{2}", "0.5", ".5", "1/2", "x/y", "1/2/3", "k = 3", "3", "abc = 3", "\\sqrt3",
    "\\sqrt{3}", "2\\sqrt", "90^\\circ", "90", "5\\text{ cm}", "5", "50\\%", "50", "\\left(1, 2\\right)", "(1,2)",
    "\\frac1{72}", "\\frac{1}{72}", "\\frac", "\\frac1", "", "3 \\text{ a} \\text{ b}", "1.5/2", "01/2", "\\$5",
    "10\\!000", "10000", "{.5}", "{0.5}",
]  # fmt: skip


def test_formulas_are_compared_as_the_harness_does():
    """But for whole numbers with leading zeros, which are other numbers there."""
    pytest.importorskip("lm_eval")
    suite = importlib.import_module("lm_eval.tasks.aime.utils")
    for text in ANSWERS:
        for target in ("\\frac{3}{4}", "7", "3", "1", "2", "a{b}c", "\\frac{1}{2}", "no box"):
            expected = suite.process_results({"answer": target}, [text])["exact_match"]
            assert same_formula(final_formula(text), target) == bool(expected), (text, target)
    for one in FORMULAS:
        for other in FORMULAS:
            assert same_formula(one, other) == suite.is_equiv(one, other), (one, other)
    assert same_formula("025", "25") and not suite.is_equiv("025", "25")


def test_numbers_are_found_as_the_harness_does():
    """By the filter and the metric of its task gsm8k."""
    pytest.importorskip("lm_eval")
    regex = importlib.import_module("lm_eval.filters.extraction").RegexFilter
    for text in ("is 18.", "$1,018", "3 and 4", "-5", "none", "a 1.50 b", "#### 7", "x=9...", "12,", "72 - 3 = 69\n\n"):
        loose = regex("(-?[$0-9.,]{2,})|(-?[0-9]+)", group_select=-1).apply([[text]], [{}])[0][0]
        assert last_number(text) == re.sub(r"\.$", "", loose.replace(",", "").replace("$", "")).replace("[invalid]", "")


# ---- IFEval -------------------------------------------------------------------------------------------------------

CASES = [
    ("keywords:existence", {"keywords": ["oak", "elm"]}),
    ("keywords:frequency", {"keyword": " oak", "frequency": 2, "relation": "at least"}),
    ("keywords:frequency", {"keyword": "oak", "frequency": 2, "relation": "less than"}),
    ("keywords:forbidden_words", {"forbidden_words": ["oak", "fir"]}),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 6, "let_relation": "at least"}),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}),
    ("length_constraints:number_words", {"num_words": 9, "relation": "less than"}),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Elm"}),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}),
    ("detectable_format:constrained_response", {}),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2}),
    ("detectable_format:json_format", {}),
    ("detectable_format:title", {}),
    ("combination:two_responses", {}),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Name a tree."}),
    ("startend:end_checker", {"end_phrase": "Any other questions?"}),
    ("startend:quotation", {}),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}),
    ("punctuation:no_comma", {}),
]
RESPONSES = [
    "", "Oak and oak, elm.", "the oak\n\nElm! has leaves", "One\n\n'elm' two\n\nthree", "a *** b", "*** a *** b ***",
    "a *** *** b", "[name] and [city of x]", "text\nP.S. more", "text p. p. s. more", "* one\n* two",
    "- one\n * two\n- three", "**bold** and *it*", "*a* *b* **", "SECTION 1 x\nSECTION 2 y", "Section 1", '{"a": 1}',
    '```json\n{"a": [1]}\n```', "{a}", "<<a title>>", "<< >>", "one ****** two", "one ****** one",
    "****** one ****** two ******", "a ****** ****** b", "name a tree. Oak", "My answer is no.",
    'So. Any other questions?"', '"quoted"', '"', "NASA AND the UN, A-B", "I'M HERE", "U.S. soil", "eeeeee EEE",
    "oakoak foak", "\n\nelm", "x\n\n\n\nelm y",
]  # fmt: skip


@pytest.fixture
def suite(monkeypatch):
    """The harness' copy of the suite's program, without what it downloads; languages are not asked for."""
    pytest.importorskip("lm_eval")
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "find", lambda *_: "found")
    monkeypatch.setattr(nltk, "word_tokenize", lambda text: nltk.tokenize.NLTKWordTokenizer().tokenize(text))
    for name in ("langdetect", "immutabledict"):  # not installed; the checks below do not ask for them
        fake = types.ModuleType(name)
        fake.immutabledict = dict
        monkeypatch.setitem(sys.modules, name, fake)
    return importlib.import_module("lm_eval.tasks.ifeval.instructions_registry").INSTRUCTION_DICT


@pytest.mark.parametrize("name, given", CASES, ids=[f"{name.split(':')[1]}" for name, _ in CASES])
def test_instructions_are_checked_as_the_suite_does(suite, name, given):
    instruction = suite[name](name)
    instruction.build_description(**given)
    told, decided = json.dumps({"id": name, "kwargs": given}), set()
    for text in RESPONSES:
        expected = bool(text.strip() and instruction.check_following(text))
        assert checks.follows(text, told) == expected, text
        decided.add(expected)
    assert decided == {True, False}
    assert suite.keys() == checks.CHECKS.keys()


def test_languages_sentences_and_cases_are_told():
    assert checks.speaks("Der Baum ist nicht alt und ich mag ihn.", "de") and not checks.speaks("Der Baum ist alt.", "en")
    assert checks.speaks("El perro y la casa de los niños", "es") and checks.speaks("यह एक पेड़ है", "hi")
    assert checks.speaks("Это дерево", "ru") and checks.speaks("12 + 3", "fr") and not checks.speaks("Это дерево", "en")
    texts = ["One. Two! Three?", "Dr. Oak met Mr. Elm. Then he left.", "No end", "", 'He said "Go!" And went.', "v. 1.5 is"]
    assert [checks.count_sentences(text) for text in texts] == [3, 2, 1, 0, 2, 1]
    upper, lower = ({"id": f"change_case:english_{name}", "kwargs": {}} for name in ("capital", "lowercase"))
    assert checks.follows("THE OAK IS OLD", json.dumps(upper)) and not checks.follows("The oak", json.dumps(upper))
    assert checks.follows("the oak is old", json.dumps(lower)) and not checks.follows("der baum ist alt", json.dumps(lower))
    told = {"id": "length_constraints:number_sentences", "kwargs": {"relation": "at least", "num_sentences": 2}}
    assert checks.follows("One. Two.", json.dumps(told)) and not checks.follows("One", json.dumps(told))
    german = json.dumps({"id": "language:response_language", "kwargs": {"language": "de"}})
    assert checks.follows("Das ist ein Baum.", german)


def test_prompts_with_instructions_are_scored_strictly_and_loosely(tmp_path):
    record = {
        "key": 1, "prompt": "Write, please.", "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
        "kwargs": [{}, {"keywords": ["oak"], "relation": None}],
    }  # fmt: skip
    (made,) = read(f"ifeval:{write(tmp_path / 'input_data.jsonl', record)}")
    assert (made.prompt, made.scorer, made.labels) == ("Write, please.", "ifeval", {"instructions": 2})
    rows = {"oak": (1, 1, 1, 1), "Sure, here:\noak": (0.5, 0, 1, 1), "elm": (0.5, 0, 0.5, 0), "": (0, 0, 0, 0)}
    for text, expected in rows.items():
        more = measures(made, text)
        assert (score(made, text), more["all_followed"], more["loose"], more["all_loose"]) == expected
    for wrong, told in (
        ({"instruction_id_list": ["punctuation:no_dot"], "kwargs": [{}]}, "expected an instruction of IFEval"),
        ({"kwargs": [{}]}, "got 2 and 1"),
        ({"kwargs": [{}, {"keywords": None}]}, r"expected the arguments \['keywords'\] of keywords:existence"),
    ):
        with pytest.raises(ValueError, match=told):
            read(f"ifeval:{write(tmp_path / 'bad.jsonl', record | wrong)}")


# ---- LongProc -----------------------------------------------------------------------------------------------------

ROUTE = "From A, take a bus to B.\nFrom B, take a train to C.\nFrom C, take a ferry to D."
TRACE = "Oak's belief:\n- Step 0: (initial) {Oak location: room; belief: None}\n- Step 1: (moved) {Oak location: hall}\nFinal"


def longproc(tmp_path, task, record, prompt):
    folder = tmp_path / task
    path = write(folder / f"{task}_2k.json", record, listed=True)
    (folder / "prompts.yaml").write_text(f"USER_PROMPT: |-\n  Read.\n\n  {prompt}\n\n  [ANSWER]")
    (made,) = read(f"longproc:{folder}")
    assert made.question == "\n\n[ANSWER]" and made.max_new_tokens == 3072 and made.task == path.stem
    return made


def test_routes_of_longproc_are_scored_as_the_suite_does(tmp_path):
    record = {"context_nl": "Cities.", "question_repr": ["A", "D"], "answer_nl": ROUTE}
    made = longproc(tmp_path, "path_traversal", record, "{city_context} From {src_city} to {dst_city}.")
    assert made.context == "Read.\n\nCities. From A to D."
    lines = ROUTE.split("\n")
    for text, exact, partial in (
        (f"<Route>\n{ROUTE}\n</Route>", 1, 1), (ROUTE, 0, 0), ("", 0, 0),
        ("<Route>\n" + "\n".join([lines[0], "x", lines[2]]) + "</Route>", 0, 2 / 3),  # the wrong line counts
        ("<Route>\n" + "\n".join(lines[:2]) + "</Route>", 0, 2 / 3),
        ("<Route>\n" + "\n".join(lines[::-1]) + "</Route>", 0, 1 / 3),
    ):  # fmt: skip
        assert (score(made, text), measures(made, text)["partial"]) == (exact, pytest.approx(partial)), text


def test_beliefs_and_tables_of_longproc_are_scored_as_the_suite_does(tmp_path):
    made = longproc(tmp_path, "tom_tracking", {"story": "S", "question": "Q", "solution": TRACE}, "{story} {question}")
    half = TRACE.replace("hall", "room")
    rows = ((TRACE, 1, 1), ("thinking\n" + TRACE.lower().replace("- step", "- Step"), 1, 1), (half, 0, 0.5), ("", 0, 0))
    for text, exact, partial in rows:
        assert (score(made, text), measures(made, text)["partial"]) == (exact, partial), text
    page = tmp_path / "html_to_tsv" / "pages" / "x.html"
    page.parent.mkdir(parents=True)
    page.write_text("<p>page</p>")
    record = {
        "html_path": "longproc_data/html_to_tsv/pages/x.html", "gt": "name\tprice\nThe Oak\t$5\nElm\t7",
        "task_topic": "trees", "task_description": "d", "tsv_header": "h", "filtering_instruction": "f",
    }  # fmt: skip
    made = longproc(tmp_path, "html_to_tsv", record, "{task_topic} {html_str}")
    assert made.context == "Read.\n\ntrees <p>page</p>"
    for text, expected in (
        ("```tsv\nname\tprice\nElm\t7\noak\t5\n```", 1.0), ("name\tprice\nElm\t7", 2 / 3), ("name\tprice\nElm\t8", 0.0),
        ("name\nElm", 0.0), ("", 0.0), ("name\tprice\nElm\t7\nOak\t5\nbroken\nend", 0.8), ("name\tprice", 0.0),
    ):  # fmt: skip
        assert score(made, text) == pytest.approx(expected), text


def test_countdown_searches_are_demonstrated_and_scored(tmp_path):
    made = longproc(tmp_path, "countdown", {"nums": [9, 16, 6, 18], "target": 12}, "{demonstration} Numbers: {nums} {target}")
    shown = demonstration([9, 16, 6, 18], 12)
    assert made.context.count("# Example") == 2 and shown in made.context and made.answers[0] == shown
    lines = shown.split("\n")
    assert lines[:5] == [
        "# Search Procedure",
        "Initial number set: [9, 16, 6, 18], target: 12. Options for choosing two numbers: "
        "[(9, 16), (9, 6), (9, 18), (16, 6), (16, 18), (6, 18)].",
        " |- Pick two numbers (9, 16) (numbers left: [6, 18]). Try possible operations.",
        "  |- Try 16 + 9 = 25. Add 25 to the number set. Current number set: [25, 6, 18], target: 12. Options for choosing "
        "two numbers: [(25, 6), (25, 18), (6, 18)].",
        "   |- Pick two numbers (25, 6) (numbers left: [18]). Try possible operations.",
    ]
    solution = re.search(r"<Solution>\n([\s\S]*)\n</Solution>", shown).group(1)
    assert solves([9, 16, 6, 18], 12, solution) and solution.endswith("= 12") and not solves([9, 16, 6, 17], 12, solution)
    for wrong in ("1 + 1 = 2", solution.replace("=", "= 1"), "9 / 0 = 1\n1 + 1 = 2\n3 + 3 = 6", "\n\n"):
        assert not solves([9, 16, 6, 18], 12, wrong)
    procedure = shown.split("Now we have")[0].removeprefix("# Search Procedure\n")
    steps = procedure.strip().split("\n")
    assert search_share(procedure, procedure) == (len(steps) - 2) / (len(steps) - 1)  # as the suite counts
    assert search_share("\n".join([*steps[:11], "x", *steps[12:]]), procedure) == 10 / (len(steps) - 1)
    assert search_share("x", procedure) == 0.0
    rows = ((shown, 1, 1), ("", 0, 0), ("# Search Procedure\n" + "\n".join([*steps[:11], "x"]), 0, 10 / (len(steps) - 1)))
    for text, exact, partial in rows:
        assert (score(made, text), measures(made, text)["partial"]) == (exact, pytest.approx(partial))
    with pytest.raises(ValueError, match="expected numbers that reach the target 1999"):
        longproc(tmp_path, "countdown", {"nums": [1, 1, 1, 1], "target": 1999}, "{nums}")


def test_files_that_are_not_longprocs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a file named TASK_SIZE.json with a task of html_to_tsv"):
        read(f"longproc:{write(tmp_path / 'travel_planning_2k.json', {}, listed=True)}")
    path = write(tmp_path / "countdown_2k.json", {"nums": [1], "target": 1}, listed=True)
    with pytest.raises(ValueError, match="prompts.yaml: expected a file, got nothing"):
        read(f"longproc:{path}")
    (tmp_path / "prompts.yaml").write_text("OTHER: x")
    with pytest.raises(ValueError, match="expected the text USER_PROMPT, got none"):
        read(f"longproc:{path}")


# ---- HELMET -------------------------------------------------------------------------------------------------------


def test_values_of_json_are_asked_behind_two_examples(tmp_path):
    record = {
        "num_kvs": 3, "context": '{"a": "1"}', "question": "a", "answer": "1", "depth": 0.5,
        "demos": [["b", "2"], ["c", "3"], ["d", "4"]],
    }  # fmt: skip
    (made,) = read(f"helmet:{write(tmp_path / 'json_kv' / 'test_k3_dep6.jsonl', record)}")
    assert made.prompt == (
        '{"a": "1"}\n\nExtract the value corresponding to the specified key in the JSON object below.\n\n'
        "Key: b\nCorresponding value: 2\n\nKey: c\nCorresponding value: 3\n\nKey: a\nCorresponding value:"
    )
    assert not made.chat and [score(made, text) for text in (" 1", "It is 'the 1'.", "2", "")] == [1, 1, 0, 0]


def test_questions_about_passages_have_two_examples_of_the_folder(tmp_path):
    def asked(question, **more):
        ctxs = [{"title": f"T {question}", "text": f"text of {question}"}]
        return {"question": question, "answers": [f"answer {question}", "x"], "ctxs": ctxs, **more}

    path = write(tmp_path / "nq-dev-multikilt_1000_k50_dep6.jsonl", asked("one"), asked("two"))
    (alone, _) = read(f"helmet:{path}")
    assert alone.labels == {"shots": 0} and alone.task == "nq" and alone.stop == ("\n",) and alone.answers[0] == "answer one"
    assert alone.prompt.endswith(
        "Answer: [answer]\n\nDocument (Title: T one): text of one\n\nQuestion: one\nAnswer:"
    )
    demos = [asked(name) for name in "abcdefgh"]
    write(tmp_path / "nq-train-multikilt_1000_k3_dep6.jsonl", *demos, demos[0])
    made, other = read(f"helmet:{path}")
    shown = re.findall(r"Question: (\w)\nAnswer: answer (\w)\n", made.prompt)
    assert len(shown) == 2 and all(a == b for a, b in shown) and len({a for a, _ in shown}) == 2
    assert made == read(f"helmet:{path}")[0] and shown != re.findall(r"Question: (\w)\nAnswer: answer (\w)\n", other.prompt)
    path = write(tmp_path / "popqa_test_1000_k50_dep6.jsonl", asked("rare", s_pop=10), asked("known", s_pop=2000))
    assert [one.answers[0] for one in read(f"helmet:{path}")] == ["answer rare"]
    with pytest.raises(ValueError, match="expected HELMET's fields"):
        read(f"helmet:{write(tmp_path / 'other.jsonl', {'a': 1})}")


def test_rankings_are_scored_by_ndcg(tmp_path):
    ctxs = [{"id": str(number), "text": f"text {number}", "label": label} for number, label in ((11, 0), (12, 3), (13, 1))]
    record = {"qid": "q", "query": "Which?", "ctxs": ctxs}
    (made,) = read(f"helmet:{write(tmp_path / 'test_reranking_data_k50_dep3.jsonl', record)}")
    assert made.prompt.endswith("[ID: 13] Document: text 13\n\nQuery: Which?\nRanking:") and made.answers[0] == "12 > 13 > 11"
    # DCG 3 + 1 / log2(3) = 3.631 is the best; 12 in the second place gives 3 / log2(3) + 1 / log2(4) = 2.393
    rows = ((" ID12 > ID13 > ID11", 1.0), ("[11] > [12] > [13]", 0.659), ("", 0.0), ("none", 0.0), ("12", 0.826))
    for text, expected in rows:
        assert score(made, text) == pytest.approx(expected, abs=1e-3)
    assert ranked_ids("First 1 > 2. Then ID: 3 > ID: 4 > ID: 3") == ["3", "4"]
    assert ndcg10("1", ("1", json.dumps({"1": 0}))) == 0.0


def test_blank_answers_of_the_new_scorers_score_nothing():
    for name in ("gsm8k", "math_formula", "helmet_substring", "longproc_path_traversal"):
        assert score(Example("t", "", "", "", ("7",), 8, name), " ") == 0.0
