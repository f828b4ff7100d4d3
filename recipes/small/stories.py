"""Short stories in simple English, each a function of its random numbers.

Belongs here: the story under construction (`Tale`), how stories open and close, documents and prompts of stories.
Does not belong here: the plots (plots.txt), names and places (world.py), conversations about a story (dialogues.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from recipes.small import world
from recipes.small.world import ANIMALS, KINDS, NUMBERS, PLACES, Noun, Who, an, lean, who

T = TypeVar("T")
HEROES = ("girl", "boy", *KINDS)
Step = tuple[str, Any]  # what to do ("say", "maybe", "turn", "let", "ask", "call") and its argument


@dataclass(frozen=True)
class Plot:
    """A parsed plot of plots.txt."""

    title: str
    topic: str
    steps: tuple[Step, ...]


def _step(line: str) -> Step:
    if not line:
        return "turn", None
    if line.startswith("@"):
        return "call", line[1:].split(" ")
    if line.startswith("Q "):
        return "ask", line[2:].split(" = ")
    if line.startswith("let "):
        names, rows = line[4:].split(": ", 1)
        return "let", (names.split(" / "), [row.split(" / ") for row in rows.split(" | ")])
    kind = "maybe" if line.startswith("? ") else "say"
    return kind, line.removeprefix("? ").split(" | ")


@cache
def plots() -> tuple[Plot, ...]:
    """Every plot, in the order of the file."""
    found = []
    for block in Path(__file__).with_name("plots.txt").read_text("utf-8").split("\n## ")[1:]:
        head, *lines = block.strip("\n").split("\n")
        title, topic = head.split(": ", 1)[1].split(" / ")
        found.append(Plot(title, topic, tuple(_step(line) for line in lines)))
    return tuple(found)


class Tale:
    """A story that grows sentence by sentence.

    words: what `say` may name in braces: h (hero), f (friend), g (a grown-up of the hero's family), the
    place's at / to, and whatever the plot puts in. facts: (question, answer) pairs about it. topic: what it is
    about, as in "a story about ...".
    """

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        self.rng = rng
        self.paragraphs: list[list[str]] = [[]]
        self.facts: list[tuple[str, str]] = []
        self.title = self.topic = ""
        self.kind = kind or lean(rng, KINDS if rng.random() < 0.5 else ("girl", "boy"))
        haunts = [place for place in PLACES.values() if self.kind in place.kinds] or list(PLACES.values())
        self.place = lean(rng, self.favourites(haunts))
        self.hero = self._person(self.kind)
        kinds = [k for k in self.place.kinds if k != self.kind]
        self.friend = self._person(lean(rng, kinds))
        while self.friend.name == self.hero.name:
            self.friend = self._person(self.friend.kind)
        elder = lean(rng, ("mother", "father", "grandmother", "grandfather"))
        female = elder.endswith("mother")
        grown = who(f"{self.hero.his} {elder}", elder, female)
        spots = rng.sample(self.place.spots, 3)
        self.words: dict[str, object] = {
            "h": self.hero,
            "f": self.friend,
            "g": grown,
            "at": self.place.at,
            "to": self.place.to,
            "spot": spots[0],
            "spot2": spots[1],
            "spot3": spots[2],
            "find": Noun(lean(rng, self.place.finds)),
            "home": self.home(self.hero),
            "trait": lean(rng, world.TRAITS),
        }
        animal = ANIMALS[self.friend.kind]
        self.put(fkind=Noun(self.friend.kind), skill=animal.skill, food=animal.food)
        self.put(afriend=f"{an(self.friend.kind)} named {self.friend}")

    def favourites(self, options: Sequence[T]) -> Sequence[T]:
        """The options in the order in which this kind of hero prefers them: every kind has another favourite."""
        first = 7 * HEROES.index(self.kind) % len(options)
        return (*options[first:], *options[:first])

    def _person(self, kind: str) -> Who:
        rng = self.rng
        girl = kind == "girl" or (kind != "boy" and rng.random() < 0.5)
        if kind in ANIMALS:
            animal = ANIMALS[kind]
            return who(lean(rng, animal.girls if girl else animal.boys), kind, girl)
        if rng.random() < 0.06:
            return who(world.new_name(rng), kind, girl)
        return who(lean(rng, world.GIRLS if girl else world.BOYS), kind, girl)

    @staticmethod
    def home(person: Who) -> str:
        """Where somebody lives, as in "lived {home}"."""
        return ANIMALS[person.kind].home if person.kind in ANIMALS else "in a small house near the village"

    def put(self, **words: object) -> None:
        """More words for `say`."""
        self.words.update(words)

    def let(self, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Words from one of the rows, which may use earlier words."""
        for name, value in zip(names, lean(self.rng, rows), strict=True):
            self.words[name] = Noun(value.format_map(self.words))

    def say(self, *options: str) -> None:
        """Add one of the options as the next sentences of the paragraph."""
        text = lean(self.rng, options).format_map(self.words)
        self.paragraphs[-1].append(text[0].upper() + text[1:])

    def maybe(self, *options: str) -> None:
        """`say` in half of the tales."""
        if self.rng.random() < 0.5:
            self.say(*options)

    def turn(self) -> None:
        """Start a new paragraph."""
        self.paragraphs.append([])

    def ask(self, question: str, answer: str) -> None:
        """Remember a question about the tale and its answer."""
        self.facts.append((question.format_map(self.words), answer.format_map(self.words)))

    def play(self, plot: Plot) -> None:
        """Let the plot happen."""
        for what, argument in plot.steps:
            if what == "turn":
                self.turn()
            elif what == "call":
                method, *rest = argument
                getattr(self, method)(*rest)
            else:
                getattr(self, what)(*argument)
        self.title = plot.title.format_map(self.words)
        self.topic = plot.topic.format_map(self.words)

    def open(self) -> None:
        """Introduce the hero and, now and then, a trait or a look."""
        hero = self.hero
        if hero.kind in ANIMALS:
            self.put(look=ANIMALS[hero.kind].look)
            self.say(
                f"Once upon a time, a little {hero.kind} named {{h}} lived {{home}}.",
                f"Once upon a time, there was a little {hero.kind} named {{h}}. {{h.He}} lived {{home}}.",
                f"There once was {an(hero.kind)} named {{h}} who lived {{home}}.",
                f"{{h}} was a little {hero.kind} with {{look}}. {{h.He}} lived {{home}}.",
            )
            self.ask("Where did {h} live?", "{h} lived {home}.")
        else:
            self.say(
                f"Once upon a time, there was a {hero.kind} named {{h}}.",
                f"Once upon a time, there was a little {hero.kind} named {{h}} who lived {{home}}.",
                f"There once was a {hero.kind} named {{h}}. {{h.He}} lived {{home}} with {{g}}.",
                f"{{h}} was a little {hero.kind} who lived near the village.",
            )
            self.ask(f"What was the name of the {hero.kind}?", f"The {hero.kind} was named {{h}}.")
        if hero.kind in ANIMALS:
            self.ask("What kind of animal was {h}?", f"{{h}} was {an(hero.kind)}.")
        self.maybe(
            "{h.He} was very {trait}.",
            "Everybody knew that {h} was {trait}.",
            f"{{h.He}} was a {{trait}} little {hero.kind}.",
        )

    def go(self) -> None:
        """The day begins and the hero goes to the place."""
        self.say(
            "One day, {h} went {to}.",
            "One sunny morning, {h} went {to}.",
            "One day, {h} wanted to go {to}. {h.He} put on {h.his} hat and set off.",
            "Early one morning, {h} walked {to}.",
            "One afternoon, {h} and {g} went {to}.",
        )
        self.sight()
        self.ask("Where did {h} go?", "{h} went {to}.")

    def sight(self) -> None:
        """Something to see at the place, in two tales of three."""
        if self.rng.random() < 0.67:
            self.say(*self.place.sights)

    def meet(self) -> None:
        """The friend comes by."""
        self.put(moved=ANIMALS[self.friend.kind].moved)
        self.say(
            "Just then, {afriend} came by.",
            "Soon {h.he} met {afriend}.",
            "Then a little {fkind} named {f} {moved} up to {h.him}.",
            "Along came {f}, a little {fkind}.",
        )

    def count_soup(self) -> None:
        """Numbers of two vegetables, and their sum."""
        first, second = self.rng.sample(("carrots", "potatoes", "onions", "tomatoes", "beans", "mushrooms"), 2)
        n, m = self.rng.randrange(2, 6), self.rng.randrange(2, 6)
        self.put(first=first, second=second, n=NUMBERS[n], m=NUMBERS[m], sum=NUMBERS[n + m])

    def count_coins(self) -> None:
        """Coins in the purse, the price, what is left."""
        coins = self.rng.randrange(5, 11)
        cost = self.rng.randrange(2, coins - 1)
        self.put(coins=NUMBERS[coins], cost=NUMBERS[cost], left=NUMBERS[coins - cost])

    def close_small(self) -> None:
        """The end of a tale whose friend is the small animal that was helped."""
        self.put(f=f"the {self.words['small']}")
        self.close("help")

    def close(self, moral: str) -> None:
        """The end, and in most tales what it teaches."""
        self.say(
            "From that day on, {h} and {f} were best friends.",
            "{h} went home with a big smile.",
            "That night, {h} fell asleep with a smile.",
            "{h} never forgot that day.",
        )
        if self.rng.random() < 0.6:
            self.turn()
            lesson = lean(self.rng, world.MORALS[moral])
            self.put(lesson=lesson, lower=lesson[0].lower() + lesson[1:])
            self.say("{lesson}", "{h} had learned something: {lower}")

    @property
    def text(self) -> str:
        """The story, a blank line between paragraphs."""
        return "\n\n".join(" ".join(sentences) for sentences in self.paragraphs if sentences)


def tell(rng: random.Random, kind: str | None = None) -> Tale:
    """A story; kind: of its hero, any where None."""
    tale = Tale(rng, kind)
    tale.play(lean(rng, tale.favourites(plots())))
    return tale


def document(rng: random.Random) -> str:
    """A training document: a story alone, or under its title, or (rarely) from somewhere in its middle on."""
    tale = tell(rng)
    form = rng.random()
    if form < 0.08:
        paragraphs = tale.text.split("\n\n")
        return "\n\n".join(paragraphs[rng.randrange(1, len(paragraphs) - 1) :])
    return f"{tale.title}\n\n{tale.text}" if form < 0.3 else tale.text


def prompt(rng: random.Random) -> tuple[str, str, None]:
    """A held-out prompt: the first words or sentences of a story."""
    text = tell(rng).text
    words = text.split(" ")
    return "story", " ".join(words[: rng.randrange(6, max(7, len(words) * 2 // 3))]), None
