"""Facts among filler: who is where, what was carried where, and where it was before; yes or no.

The four kinds are ideas of bAbI (Weston et al. 2015, arXiv:1502.05698), hidden in a text as BABILong does (Kuratov
et al. 2024, arXiv:2406.10149). People, things, places and verbs are ours, and the world is our own: people walk, pick things
up and put them down, and a thing is where its carrier is.

1. where a person is: one fact, the newest of this person;
2. where a thing is: two facts, who took it and where this person went;
3. where a thing was before it came to a place: three facts;
4. whether a person is at a place, yes or no.

All stand in their order, spread over the text. The answer to the second first names who took the thing.
"""

import random

from experiments.tasks.associations import PEOPLE
from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import fit, spread

PLACES = ("cellar", "attic", "stable", "chapel", "library", "tower", "bakery", "harbour", "orchard", "laundry")
THINGS = ("lantern", "ladder", "violin", "basket", "blanket", "compass", "kettle", "hammer")
PERSONS, ROOMS, CARRIED = 3, 5, 3  # of a text
_VERBS = {
    "walk": ("{person} walked to the {it}.", "{person} went to the {it}.", "{person} hurried to the {it}."),
    "take": ("{person} picked up the {it}.", "{person} took the {it}."),
    "drop": ("{person} put down the {it}.", "{person} left the {it} there."),
}


class World:
    """People who walk and carry things, and what happened so far.

    Args:
        rng: draws the events.

    Attributes:
        people, places, things: who and what there is.
        place: person -> where it is; only people who have walked.
        carrier: thing -> who carries it.
        visited: thing -> the places at which it was, in order.
        events: (form, person, place or thing) in order.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.people, self.places, self.things = (
            rng.sample(names, count) for names, count in ((PEOPLE, PERSONS), (PLACES, ROOMS), (THINGS, CARRIED))
        )
        self.place: dict[str, str] = {}
        self.carrier: dict[str, str] = {}
        self.visited: dict[str, list[str]] = {thing: [] for thing in self.things}
        self.events: list[tuple[str, str, str]] = []
        self._at: dict[str, str] = {}  # where things lie

    def walk(self, person: str) -> None:
        """Let a person go to another place."""
        place = self._rng.choice([place for place in self.places if place != self.place.get(person)])
        self.place[person] = place
        for thing, carrier in self.carrier.items():
            if carrier == person:
                self.visited[thing].append(place)
        self.events.append(("walk", person, place))

    def take(self, person: str, thing: str) -> None:
        """Let a person pick a thing up where the person is."""
        self.carrier[thing] = person
        if self.visited[thing][-1:] != [self.place[person]]:
            self.visited[thing].append(self.place[person])
        self.events.append(("take", person, thing))

    def drop(self, thing: str) -> None:
        """Let the carrier of a thing put it down."""
        person = self.carrier.pop(thing)
        self._at[thing] = self.place[person]
        self.events.append(("drop", person, thing))

    def happen(self) -> None:
        """Draw an event that can happen."""
        person = self._rng.choice(self.people)
        here = [
            thing
            for thing in self.things
            if thing not in self.carrier and self._at.get(thing, self.place.get(person)) == self.place.get(person, "")
        ]
        mine = [thing for thing, carrier in self.carrier.items() if carrier == person]
        if person not in self.place or (self._rng.random() < 0.5 or not (here or mine)):
            self.walk(person)
        elif here and (not mine or self._rng.random() < 0.6):
            self.take(person, self._rng.choice(here))
        else:
            self.drop(self._rng.choice(mine))


def happenings(request: Request, level: int, events: int) -> Document:
    """Spread events over a text and ask about them.

    Args:
        request: what to make.
        level: 1 to 4, see the module's docstring.
        events: number of events.
    """
    rng, prompt, haystack = request.rng, request.prompt, request.haystack
    asked = None
    while asked is None:  # a world in which the question can be asked
        world = World(rng)
        for _ in range(events):
            world.happen()
        asked = _asked(rng, world, level)
    *places, answer = asked
    facts = [rng.choice(_VERBS[form]).format(person=person, it=it) for form, person, it in world.events]
    question, prefix = (prompt.forms[f"{name}_{level}"].format(*places) for name in ("ask", "prefix"))
    questions = [Question(prompt.question.format(question=question), prefix, (answer,), f" {answer}.")]

    def build(budget: int) -> str:
        return prompt.context.format(context=haystack.separator.join(spread(rng, haystack.span(rng, budget), facts)))

    fixed = request.count_tokens(prompt.context.format(context=""))
    return fit(request, questions, fixed + sum(request.count_tokens(haystack.separator + fact) for fact in facts), build)


def _asked(rng: random.Random, world: World, level: int) -> tuple[str, ...] | None:
    """Return what a question names and its answer, or None if the world has no such question."""
    moved = [thing for thing, places in world.visited.items() if len(places) > 1 and places[-1] not in places[:-1]]
    if level in (2, 3):
        if not moved:
            return None
        thing = rng.choice(moved)
        places = world.visited[thing]
        return (thing, places[-1]) if level == 2 else (thing, places[-1], places[-2])
    person = rng.choice(world.people)
    if person not in world.place:
        return None
    if level == 1:
        return person, world.place[person]
    yes = rng.random() < 0.5
    other = rng.choice([place for place in world.places if place != world.place[person]])
    return (person, world.place[person], "Yes") if yes else (person, other, "No")
