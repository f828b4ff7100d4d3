"""Questions with one right answer: little facts, sums, spelling, opposites, counting.

Belongs here: the tables of what the small model knows (with talk.txt), and how it is asked.
Does not belong here: conversations and stories (dialogues.py).
"""

# ruff: noqa: E501  (tables read better as rows)
from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from recipes.small.world import ANIMALS, BOYS, GIRLS, KINDS, NUMBERS, WORDS, an, new_name

Turn = tuple[str, str, str]  # the user's message, reasoning of the reply, the reply


def loose(rng: random.Random, text: str) -> str:
    """The message, now and then typed in a hurry: no capital, no final mark."""
    if rng.random() < 0.85:
        return text
    return text[0].lower() + text[1:].rstrip(".?!")


def _table(section: str) -> tuple[tuple[str, ...], ...]:
    """The rows of a section of talk.txt."""
    text = Path(__file__).with_name("talk.txt").read_text("utf-8")
    lines = text.split(f"\n## {section}\n")[1].split("\n\n")[0].strip().split("\n")
    return tuple(tuple(line.split(" => ")) for line in lines)


TALK = _table("talk")
FACTS = {question: answer for question, answer in _table("facts")}
ABOUT = {thing: text for thing, text in _table("about")}
SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink", "horse": "neigh", "owl": "hoo", "frog": "croak", "mouse": "squeak", "bee": "buzz", "lion": "roar"}  # fmt: skip
OPPOSITES = (
    ("big", "small"), ("hot", "cold"), ("day", "night"), ("up", "down"), ("happy", "sad"), ("fast", "slow"), ("old", "young"),
    ("open", "closed"), ("full", "empty"), ("hard", "soft"), ("high", "low"), ("left", "right"), ("light", "dark"), ("long", "short"),
    ("loud", "quiet"), ("rich", "poor"), ("strong", "weak"), ("wet", "dry"), ("good", "bad"), ("first", "last"), ("early", "late"),
    ("clean", "dirty"), ("near", "far"), ("thick", "thin"), ("yes", "no"), ("in", "out"), ("black", "white"), ("hello", "goodbye"),
)  # fmt: skip
GROUPS = {
    "animal": ("cat", "dog", "horse", "lion", "cow", "rabbit"),
    "fruit": ("apple", "pear", "plum", "banana", "cherry", "lemon"),
    "color": ("red", "blue", "green", "yellow", "white", "black"),
    "vegetable": ("carrot", "onion", "potato", "bean", "pumpkin"),
    "tool": ("hammer", "saw", "shovel", "knife"),
    "bird": ("eagle", "owl", "duck", "hen", "swan"),
    "flower": ("rose", "tulip", "daisy", "sunflower"),
    "drink": ("water", "milk", "tea", "juice"),
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December")  # fmt: skip
PLURALS = {"mouse": "mice", "child": "children", "foot": "feet", "tooth": "teeth", "man": "men", "woman": "women", "goose": "geese", "leaf": "leaves", "sheep": "sheep", "fish": "fish"}  # fmt: skip


def talk(rng: random.Random) -> Turn:
    """Small talk with a fixed reply."""
    said, thought, reply = rng.choice(TALK)
    return loose(rng, rng.choice(said.split(" | "))), thought, reply


def fact(rng: random.Random) -> Turn:
    """One of the table of facts."""
    question = rng.choice(tuple(FACTS))
    return loose(rng, question), f"The user asks: {question} I know this.", FACTS[question]


def animal(rng: random.Random) -> Turn:
    """Homes, food, skills and sounds of animals."""
    if rng.random() < 0.3:
        kind = rng.choice(tuple(SOUNDS))
        ask = rng.choice((f"What does {an(kind)} say?", f"What sound does {an(kind)} make?"))
        return (
            loose(rng, ask),
            f"The user asks for the sound of {an(kind)}.",
            f"{an(kind).capitalize()} says {SOUNDS[kind]}.",
        )
    kind = rng.choice(KINDS)
    it, a = ANIMALS[kind], an(kind)
    ask, answer = rng.choice(
        (
            (f"What does {a} like to eat?", f"{a.capitalize()} likes to eat {it.food}."),
            (f"What can {a} do?", f"{a.capitalize()} can {it.skill}."),
            (f"What does {a} look like?", f"{a.capitalize()} has {it.look}."),
            (f"Tell me about {a}.", f"{a.capitalize()} has {it.look}. It can {it.skill} and likes to eat {it.food}."),
        )
    )
    return loose(rng, ask), f"The user asks about {a}.", answer


def about(rng: random.Random) -> Turn:
    """Two sentences about something."""
    thing = rng.choice(tuple(ABOUT))
    return (
        loose(rng, rng.choice((f"Tell me about {thing}.", f"What do you know about {thing}?"))),
        f"The user asks about {thing}.",
        ABOUT[thing],
    )


def unknown(rng: random.Random) -> Turn:
    """A thing that does not exist."""
    thing = new_name(rng).lower()
    ask = rng.choice(
        (
            f"What is {an(thing)}?",
            f"What is the capital of {thing.capitalize()}?",
            f"Tell me about {thing}.",
            f"Who is {thing.capitalize()}?",
        )
    )
    return (
        loose(rng, ask),
        "I have never heard of that. I should say so.",
        "I do not know that. I am only a small model.",
    )


def total(rng: random.Random) -> Turn:
    """A sum or a difference up to 20."""
    a, b = rng.randrange(0, 13), rng.randrange(0, 13)
    if rng.random() < 0.6:
        ask = rng.choice(
            (
                f"What is {a} plus {b}?",
                f"What is {a} + {b}?",
                f"Add {a} and {b}.",
                f"{a} + {b} = ?",
                f"How much is {a} and {b}?",
            )
        )
        return ask, f"I have to add {a} and {b}. {a} + {b} = {a + b}.", f"{a} plus {b} is {a + b}."
    a, b = a + b, b
    ask = rng.choice((f"What is {a} minus {b}?", f"What is {a} - {b}?", f"Take {b} away from {a}.", f"{a} - {b} = ?"))
    return ask, f"I have to take {b} away from {a}. {a} - {b} = {a - b}.", f"{a} minus {b} is {a - b}."


def apples(rng: random.Random) -> Turn:
    """A sum in words about somebody's things."""
    a, b = rng.randrange(2, 7), rng.randrange(1, 6)
    name = rng.choice(GIRLS + BOYS)
    he = "she" if name in GIRLS else "he"
    thing = rng.choice(("apples", "coins", "books", "eggs", "balls", "nuts"))
    if rng.random() < 0.5 or b >= a:
        ask = f"{name} has {NUMBERS[a]} {thing} and gets {NUMBERS[b]} more. How many {thing} does {he} have now?"
        total, sign = a + b, "+"
    else:
        ask = f"{name} has {NUMBERS[a]} {thing} and gives {NUMBERS[b]} away. How many {thing} does {he} have now?"
        total, sign = a - b, "-"
    count = NUMBERS[total]
    return (
        ask,
        f"I have to count: {a} {sign} {b} = {total}.",
        f"{name} has {count} {thing if total != 1 else thing[:-1]} now.",
    )


def bigger(rng: random.Random) -> Turn:
    """Which of two numbers is bigger."""
    a, b = rng.sample(range(0, 100), 2)
    return (
        loose(rng, rng.choice((f"Which is bigger, {a} or {b}?", f"Which number is bigger: {a} or {b}?"))),
        f"I compare {a} and {b}. The bigger one is {max(a, b)}.",
        f"{max(a, b)} is bigger than {min(a, b)}.",
    )


def counting(rng: random.Random) -> Turn:
    """Counting from one number to another."""
    a = rng.randrange(1, 12)
    b = a + rng.randrange(3, 9)
    row = ", ".join(str(n) for n in range(a, b + 1))
    return (
        loose(rng, rng.choice((f"Count from {a} to {b}.", f"Please count from {a} to {b}."))),
        f"I count from {a} to {b}.",
        f"{row}.",
    )


def spelling(rng: random.Random) -> Turn:
    """Letters of a word."""
    word = rng.choice(WORDS)
    letters = "-".join(word.upper())
    ask, answer = rng.choice(
        (
            (f"How do you spell {word}?", f"{letters}."),
            (f"Spell the word {word}.", f"{letters}."),
            (f"What is the first letter of {word}?", f"The first letter of {word} is {word[0].upper()}."),
            (f"How many letters does {word} have?", f"The word {word} has {NUMBERS[len(word)]} letters."),
        )
    )
    return loose(rng, ask), f"The letters of {word} are {letters}.", answer


def opposite(rng: random.Random) -> Turn:
    """The opposite of a word."""
    pair = rng.choice(OPPOSITES)
    a, b = pair if rng.random() < 0.5 else pair[::-1]
    return (
        loose(rng, f"What is the opposite of {a}?"),
        f"The user asks for the opposite of {a}.",
        f"The opposite of {a} is {b}.",
    )


def group(rng: random.Random) -> Turn:
    """Members of a group, or the group of a member."""
    name = rng.choice(tuple(GROUPS))
    members = GROUPS[name]
    if rng.random() < 0.4:
        return (
            loose(rng, f"Name three {name}s."),
            f"I need three {name}s.",
            f"{members[0].capitalize()}, {members[1]} and {members[2]}.",
        )
    one = rng.choice(members)
    other = rng.choice(
        [key for key in GROUPS if key != name and one not in GROUPS[key] and {key, name} != {"animal", "bird"}]
    )
    it = one if name in ("color", "drink") else an(one)
    of_name, of_other = an(name), an(other)
    if rng.random() < 0.5:
        return loose(rng, f"Is {it} {of_name}?"), f"{it.capitalize()} is {of_name}.", f"Yes, {it} is {of_name}."
    thought = f"{it.capitalize()} is {of_name}, not {of_other}."
    return loose(rng, f"Is {it} {of_other}?"), thought, f"No, {it} is {of_name}."


def calendar(rng: random.Random) -> Turn:
    """The day or month before or after another."""
    names = DAYS if rng.random() < 0.5 else MONTHS
    at = rng.randrange(len(names))
    step, word = rng.choice(((1, "after"), (-1, "before")))
    return (
        loose(rng, f"What comes {word} {names[at]}?"),
        f"The user asks what comes {word} {names[at]}.",
        f"{names[(at + step) % len(names)]} comes {word} {names[at]}.",
    )


def plural(rng: random.Random) -> Turn:
    """The plural of an irregular word."""
    word = rng.choice(tuple(PLURALS))
    return (
        loose(rng, rng.choice((f"What is the plural of {word}?", f"One {word}, two ...?"))),
        f"The user asks for the plural of {word}.",
        f"One {word}, two {PLURALS[word]}.",
    )


_TURNS: tuple[Callable[[random.Random], Turn], ...] = (
    fact, fact, fact, animal, about, unknown, total, total, total, apples, bigger, counting, spelling, spelling, opposite, group, calendar, plural,
)  # fmt: skip


def any_turn(rng: random.Random) -> list[Turn]:
    """One question of any kind, as a conversation of one turn."""
    return [rng.choice(_TURNS)(rng)]
