"""Tasks without literal needles: twins, shares, chances, and answers that another reader of the text finds."""

import collections
import random
import re

import pytest

from experiments import tasks
from experiments.cli import read_record
from experiments.evaluation import EvaluationSettings, Runner
from experiments.evaluation.plots import default_kinds
from experiments.evaluation.understanding import by_kind, paraphrase
from experiments.tasks import entries, happenings
from experiments.tasks.associations import PEOPLE, TOLD, table
from experiments.tasks.base import DESCRIPTIONS, PROMPTS
from tests.experiments.test_tasks import coarse, documents

GROUP = tasks.GROUPS["understanding"]
TWINS = [name for name in GROUP if f"{name}_literal" in GROUP]
LOGS = [name for name in GROUP if name.startswith("log")]
FUNCTION_WORDS = set("a an the of in at to is which who one person question and does has have this there text it the".split())
NAME = "|".join(PEOPLE)


def drawn(name: str, number: int = 3, length: int = 3000) -> list[tasks.Example]:
    return [document.samples()[0] for document in documents(name, length, number, count_tokens=coarse)]


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower())) - FUNCTION_WORDS


def pattern(form: str) -> re.Pattern[str]:
    """A form of a fact, whose places are groups."""
    return re.compile(re.escape(form).replace(r"\{name\}", rf"(?P<name>{NAME}|\d{{7}})").replace(r"\{it\}", "(?P<it>[^.]+?)"))


def read_facts(form: re.Pattern[str], one: tasks.Example) -> dict[str, str]:
    return {found["name"]: found["it"] for found in form.finditer(one.context)}


@pytest.mark.parametrize("name", TWINS)
def test_question_and_fact_share_no_word_and_the_twin_shares_them_all(name):
    prompt, pairs = PROMPTS[name], table(DESCRIPTIONS[name]["pairs"])
    for key, things in pairs.items():
        if "people" not in DESCRIPTIONS[name]:  # in RULER's frame, which question and fact share
            assert not any(words(key) & words(thing) for thing in things)
            continue
        asked = words((prompt.question + prompt.prefix).format(it=key))
        for thing in things:
            told = words(prompt.forms["fact"].format(name="", it=thing))
            assert not asked & told and not any(a in b or b in a for a in asked for b in told if min(len(a), len(b)) > 2)
        assert words(prompt.forms["literal"].format(name="", it=key)) <= asked
    every = [thing for things in pairs.values() for thing in things]
    assert len(every) == len(set(every))


@pytest.mark.parametrize("name", TWINS)
def test_twins_differ_in_the_facts_and_a_reader_with_the_table_finds_the_person(name):
    prompt = PROMPTS[name]
    key_of = {thing: key for key, things in table(DESCRIPTIONS[name]["pairs"]).items() for thing in things}
    for one, twin in zip(drawn(name), drawn(f"{name}_literal"), strict=True):
        assert (one.question, one.answer_prefix, one.answers) == (twin.question, twin.answer_prefix, twin.answers)
        forms = [pattern(prompt.forms[form]) for form in ("fact", "literal")]
        assert forms[0].sub("", one.context) == forms[1].sub("", twin.context)
        told, literally = read_facts(forms[0], one), read_facts(forms[1], twin)
        assert len(told) == TOLD and {person: key_of[thing] for person, thing in told.items()} == literally
        (person,) = (person for person, key in literally.items() if one.question == prompt.question.format(it=key))
        assert one.answers == (person,)


@pytest.mark.parametrize("name", LOGS)
def test_a_reader_of_a_log_finds_the_answer_in_entries_that_are_spread_over_it(name):
    said = DESCRIPTIONS[name]
    for one in drawn(name):
        form = r"^(?:(\w+), )?(\d+) (\w+) (\d+): \w+ in (\w+) paid (\d) (?:dollars|for (\w+))\.$"
        log = [(found[0] or found[-1], *found[1:-1]) for found in re.findall(form, one.context, re.MULTILINE)]
        days = [(int(year), entries.MONTHS.index(month), int(day)) for _, day, month, year, *_ in log]
        assert days == sorted(set(days)) and len(log) > 100
        town = re.search(r"the entries of (\w+)", one.question)
        mine = [(at, thing) for at, (thing, *_, place, _) in enumerate(log) if town is None or place == town.group(1)]
        named = [thing for thing in entries.THINGS if re.search(rf"\b{thing}\b", one.question)]
        times = collections.Counter(thing for _, thing in mine)
        if "few" in said:
            mine = [(at, thing) for at, thing in mine if thing in named]
        answer = {
            "most": lambda times=times: times.most_common(1)[0][0],
            "compare": lambda times=times, named=named: max(named, key=times.__getitem__),
            "count": lambda mine=mine: str(len(mine)),
            "sum": lambda mine=mine, log=log: str(sum(int(log[at][-1]) for at, _ in mine)),
            "next": lambda mine=mine, log=log: log[mine[0][0] + 1][-1],
        }[said["asks"]]()
        assert one.answers == (answer,)
        if "few" not in said:
            assert len(mine) / len(log) == pytest.approx(said.get("share", 1.0), abs=0.02)
            assert len({4 * at // len(log) for at, _ in mine}) >= 3
            first, second = (count for _, count in times.most_common(2))
            assert first >= 2 * second
        else:
            assert len(named) == (2 if said["asks"] == "sum" else 1)
            assert len(mine) in entries.COUNTS if said["asks"] == "count" else len(mine) == len(named)


@pytest.mark.parametrize("name", [name for name in GROUP if name.startswith("again")])
def test_one_text_of_requests_that_differ_in_a_name_is_asked_for(name):
    said = DESCRIPTIONS[name]
    for one in drawn(name, 6):
        turns = re.findall(r"User: Write a (\w+) about (\w+) for (\w+)\.\nAssistant, .+?: (.+)", one.context)
        kind, topic, person = re.search(r"Repeat the (\w+) about (\w+) that is for (\w+)\.", one.question).groups()
        same = {who: text for *asked, who, text in turns if asked == [kind, topic]}
        assert len(same) == said["count"] and one.answers == (same[person],)
        assert len({text.split(".")[0] for text in same.values()}) == len(same)
        others = [turn for turn in turns if turn[:2] != (kind, topic)]
        assert any(kind == one for one, *_ in others) and not any(who in same for _, _, who, _ in others)
        wrong = [text for who, text in same.items() if who != person]
        assert all(tasks.score(name, text, one.answers) < 0.4 for text in wrong)
        half = " ".join(same[person].split()[:5] + ["other"])
        assert tasks.score(name, half, one.answers) == 5 / len(same[person].split())


@pytest.mark.parametrize("name", ["corrected_1", "corrected_2"])
def test_the_newest_code_counts(name):
    said = DESCRIPTIONS[name]
    for one in drawn(name):
        codes = collections.defaultdict(list)
        for thing, value in re.findall(r"code of my (\w+)(?: is|: it is not \d+, but) (\d+)\.", one.context):
            codes[thing].append(value)
        assert len(codes) == said["things"] and all(len(set(values)) == said["times"] + 1 for values in codes.values())
        assert one.answers == (codes[re.search(r"user's (\w+)", one.question).group(1)][-1],)


@pytest.mark.parametrize("name", [name for name in GROUP if name.startswith("facts")])
def test_a_reader_of_what_people_did_finds_the_answer(name):
    level = DESCRIPTIONS[name]["level"]
    form = rf"({NAME}) (walked to|went to|hurried to|picked up|took|put down|left) the (\w+)( there)?\."
    for one in drawn(name, 8):
        place, holds, visited = {}, collections.defaultdict(set), collections.defaultdict(list)
        told = re.findall(form, one.context)
        assert len(told) == DESCRIPTIONS[name]["events"]
        for person, verb, it, _ in told:
            if verb.endswith("to"):
                assert place.get(person) != it
                place[person] = it
                for thing in holds[person]:
                    visited[thing].append(it)
            elif verb in ("picked up", "took"):
                assert not any(it in things for things in holds.values())
                assert not visited[it] or visited[it][-1] == place[person]  # it lies where it was left
                holds[person].add(it)
                visited[it] = visited[it] or [place[person]]
            else:
                holds[person].remove(it)
        person = re.search(NAME, one.question)
        thing = re.search("|".join(happenings.THINGS), one.question)
        asked = re.search("|".join(happenings.PLACES), one.question)
        answer = {
            1: lambda person=person, place=place: place[person.group()],
            2: lambda thing=thing, visited=visited: visited[thing.group()][-1],
            3: lambda thing=thing, visited=visited: visited[thing.group()][-2],
            4: lambda person=person, asked=asked, place=place: "Yes" if place[person.group()] == asked.group() else "No",
        }[level]()
        assert one.answers == (answer,)
        if level in (2, 3):
            assert len(visited[thing.group()]) > 1  # carried from one place to another


def offered(name: str, one: tasks.Example) -> list[str]:
    """What an answer may be guessed from."""
    said = DESCRIPTIONS[name]
    if said["kind"] == "association":
        return sorted(read_facts(pattern(PROMPTS[name].forms["literal" if "literal" in said else "fact"]), one))
    if said["kind"] == "corrections":
        thing = re.search(r"user's (\w+)", one.question).group(1)
        return re.findall(rf"code of my {thing}\b.*?(\d+)\.", one.context)
    if said["kind"] == "near_duplicates":
        kind, topic = re.search(r"Repeat the (\w+) about (\w+) ", one.question).groups()
        return re.findall(rf"Write a {kind} about {topic} for \w+\.\nAssistant, .+?: (.+)", one.context)
    if said["kind"] == "happenings":
        return ["Yes", "No"] if said["level"] == 4 else sorted(set(re.findall("|".join(happenings.PLACES), one.context)))
    if said["asks"] in ("count", "sum", "next"):
        return [str(number) for number in entries.COUNTS] if said["asks"] == "count" else ["5", "10"][said["few"] - 1 :]
    if said["asks"] == "compare":
        return [thing for thing in entries.THINGS if re.search(rf"\b{thing}\b", one.question)]
    return [thing for thing, times in collections.Counter(re.findall(r"for (\w+)\.", one.context)).items() if times > 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUP)
def test_a_guess_scores_the_chance_that_the_task_names(name):
    rng, scores = random.Random(0), []
    for one in drawn(name, 300, 900):
        scores.append(tasks.score(name, rng.choice(offered(name, one)), one.answers))
    chance = tasks.get_task(name).chance
    more = 0.1 if name.startswith("again") else 0.0  # a wrong text may begin with a right word
    assert chance - 0.09 < sum(scores) / len(scores) < chance + more + 0.09


@pytest.mark.slow
def test_a_method_that_keeps_the_wrong_tokens_scores_no_more_than_a_guess(tmp_path, quick_compile):
    """By the shipped model, which knows RULER's needle alone."""
    names, reverse = ["assoc_form", "assoc_form_literal"], "experiments.evaluation.reversed:Reversed"
    given = {"tasks": names, "methods": [reverse], "lengths": [512], "samples": 24, "workers": 0}
    settings = EvaluationSettings.from_mapping(given, "a test")
    Runner(settings, settings.load(), tmp_path, progress=False).run()
    scores = {(row["method"], row["name"]): row["value"] for row in read_record(tmp_path)["metrics"]}
    assert scores["full", "assoc_form"] >= 60 and scores["full", "assoc_form_literal"] >= 75
    assert max(scores["reversed", name] for name in names) <= 100 * tasks.get_task("assoc_form").chance


def scored(method: str, **values: float) -> list[dict]:
    return [
        {"unit": "percent", "method": method, "question": "prefill", "length": 4096, "name": name, "value": value}
        for name, value in values.items()
    ]


def test_a_kind_is_a_mean_over_the_tasks_that_full_solves_and_twins_count_together():
    pytest.importorskip("matplotlib")
    full = scored(
        "full", assoc_kind=80, assoc_kind_literal=40, assoc_made=20, assoc_made_literal=90, log_most=70, log_next=60
    )
    rows = [*full, *scored("quest", assoc_kind=50, assoc_kind_literal=60, log_most=10)]
    means = by_kind(rows)
    assert means["full", "prefill", 4096] == {"literal": 40, "paraphrased": 80, "logs": 65}
    assert means["quest", "prefill", 4096] == {"literal": 60, "paraphrased": 50}  # it lacks a log that Full solves
    assert "paraphrase" in default_kinds(rows) and "paraphrase" not in default_kinds(scored("full", vt=90))
    elsewhere = [{**row, "length": 8192} for row in full]  # fewer methods, so it is not drawn
    (points,) = (panel.lines for panel in paraphrase([*elsewhere, *rows]).axes)
    assert {(*line.get_xdata(), *line.get_ydata()) for line in points if len(line.get_xdata()) == 1} == {(40, 80), (60, 50)}
    with pytest.raises(ValueError, match="needs tasks of the group paraphrased"):
        paraphrase(scored("full", vt=90))
