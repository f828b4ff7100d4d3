"""Short conversations in the chat format of DeepSeek-V4.1.

Belongs here: the format as the corpus needs it, and talk: greetings, names, requests for stories, questions about one.
Does not belong here: questions with one right answer (knowledge.py), recall over a context (tasks.py).

The format is spelled here, not taken from deepseek-recipe, because the training machine has no such package;
tests/recipes/test_small_data.py holds the two against each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from recipes.small import knowledge, stories
from recipes.small.knowledge import Turn, loose
from recipes.small.tokenizer import ASSISTANT, END_THINK, EOS, SYSTEM, THINK, USER
from recipes.small.world import ANIMALS, KINDS, an, any_name, lean

EFFORTS = (75, 75, 75, 75, 50, 25, 100)
NAME = "Pip"  # what the model calls itself


def chat(turns: Sequence[Turn], *, thinking: bool, system: str = "", effort: int = 75, open_end: bool = False) -> str:
    """A conversation without BOS and without the last EOS.

    Only the last reply keeps its reasoning, as the format wants. open_end: stop where the last reply starts
    (after `<think>` or `</think>`), which makes a prompt.
    """
    head = ""
    if thinking:
        head = f"Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    parts = [SYSTEM, head, system] if head or system else []
    for message, _, reply in turns[:-1]:
        parts += [USER, message, ASSISTANT, END_THINK, reply, EOS]
    message, reasoning, reply = turns[-1]
    parts += [USER, message, ASSISTANT, THINK if thinking else END_THINK]
    if not open_end:
        parts += [reasoning, END_THINK, reply] if thinking else [reply]
    return "".join(parts)


def greeting(rng: random.Random) -> list[Turn]:
    """Hello."""
    word = rng.choice(("Hello", "Hi", "Good morning", "Good evening", "Hey", "Hello there", "Hi there"))
    answer = word.removesuffix(" there").replace("Hey", "Hello")
    said = loose(rng, word + rng.choice((".", "!", "")))
    return [(said, "The user greets me. I say hello.", f"{answer}! How can I help you?")]


def small_talk(rng: random.Random) -> list[Turn]:
    """One exchange with a fixed reply."""
    return [knowledge.talk(rng)]


def user_name(rng: random.Random) -> list[Turn]:
    """The user says a name and asks for it later."""
    name = any_name(rng)
    told = rng.choice((f"My name is {name}.", f"Hello, my name is {name}.", f"I am {name}.", f"Hi! I am {name}."))
    turns = [(told, f"The user is named {name}.", f"Hello, {name}! Nice to meet you.")]
    if rng.random() < 0.6:
        turns += rng.choice((knowledge.any_turn, small_talk))(rng) if rng.random() < 0.5 else []
        turns.append(
            (
                loose(rng, rng.choice(("What is my name?", "Who am I?", "Do you know my name?"))),
                f"The user said that the name is {name}.",
                f"Your name is {name}.",
            )
        )
    return turns


def say_again(rng: random.Random) -> list[Turn]:
    """Repeat some words."""
    words = " ".join(rng.sample(knowledge.WORDS, rng.randrange(1, 6)))
    return [
        (
            rng.choice((f"Say: {words}", f"Repeat after me: {words}", f"Please say this: {words}")),
            f"I have to say: {words}",
            words,
        )
    ]


def story_request(rng: random.Random) -> list[Turn]:
    """A story about some kind of hero, or any story."""
    kind = rng.choice((*stories.HEROES, None))
    tale = stories.tell(rng, kind)
    verb = rng.choice(
        (
            "Tell me a story",
            "Tell me a short story",
            "Can you tell me a story",
            "Please tell me a story",
            "Write a story",
            "I want to hear a story",
        )
    )
    end = "?" if verb.startswith("Can") else "."
    about = f"{an(tale.kind)}" if kind else ""
    if kind and rng.random() < 0.3:
        about = f"{an(tale.kind)} named {tale.hero}"
    elif rng.random() < 0.3:
        about = tale.topic
    ask = f"{verb} about {about}{end}" if about else verb + end
    thought = f"The user wants a story about {about}." if about else "The user wants a story."
    return [(loose(rng, ask), f"{thought} I will tell about {tale.hero}, {an(tale.kind)}.", tale.text)]


def persona(rng: random.Random) -> tuple[str, list[Turn]]:
    """A system message that gives a name or a nature, and questions about it."""
    if rng.random() < 0.5:
        name = any_name(rng)
        system = rng.choice((f"Your name is {name}.", f"You are {name}.", f"You are a helpful assistant named {name}."))
        ask = rng.choice(("What is your name?", "Who are you?", "Tell me your name."))
        return system, [(loose(rng, ask), f"My name is {name}.", f"My name is {name}.")]
    kind = rng.choice(KINDS)
    animal = ANIMALS[kind]
    name = lean(rng, animal.girls + animal.boys)
    asks = {
        "Who are you?": f"I am {an(kind)}. My name is {name}.",
        "What is your name?": f"My name is {name}.",
        "Where do you live?": f"I live {animal.home}.",
        "What do you like to eat?": f"I like to eat {animal.food}.",
        "What can you do well?": f"I can {animal.skill}.",
    }
    turns = []
    for ask in rng.sample(list(asks), rng.randrange(1, 4)):
        turns.append((loose(rng, ask), f"I am {an(kind)} named {name}.", asks[ask]))
    return f"You are {an(kind)} named {name}.", turns


_TALK: tuple[Callable[[random.Random], list[Turn]], ...] = (
    greeting, small_talk, small_talk, small_talk, user_name, say_again, story_request, story_request,
)  # fmt: skip
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer in simple English.",
    f"You are {NAME}, a small language model.",
)


def _conversation(rng: random.Random) -> tuple[str, list[Turn]]:
    """System message ("" for none) and turns."""
    if rng.random() < 0.12:
        return persona(rng)
    system = rng.choice(_SYSTEMS) if rng.random() < 0.15 else ""
    turns: list[Turn] = []
    if rng.random() < 0.25:
        turns += greeting(rng)
    for _ in range(rng.randrange(1, 4)):
        turns += rng.choice(_TALK)(rng) if rng.random() < 0.5 else knowledge.any_turn(rng)
    return system, turns


def _about_story(rng: random.Random) -> list[Turn]:
    """A story in the user's first message and questions about it."""
    tale = stories.tell(rng)
    asked = rng.sample(tale.facts, min(len(tale.facts), rng.randrange(1, 5)))
    turns = [(question, f"The story says: {answer}", answer) for question, answer in asked]
    lead = rng.choice(("Here is a story.", "Read this story.", "Listen to this story.", ""))
    turns[0] = ("\n\n".join(part for part in (lead, tale.text, turns[0][0]) if part), *turns[0][1:])
    return turns


def document(rng: random.Random) -> str:
    """A training document: small talk and questions."""
    system, turns = _conversation(rng)
    return chat(turns, thinking=rng.random() < 0.5, system=system, effort=rng.choice(EFFORTS))


def story_document(rng: random.Random) -> str:
    """A training document: a story and questions about it."""
    return chat(_about_story(rng), thinking=rng.random() < 0.5, effort=rng.choice(EFFORTS))


def prompt(rng: random.Random) -> tuple[str, str, None]:
    """A held-out prompt of small talk or a question."""
    system, turns = _conversation(rng)
    return "chat", chat(turns, thinking=rng.random() < 0.5, system=system, open_end=True), None


def story_prompt(rng: random.Random) -> tuple[str, str, str]:
    """A held-out prompt: a story and a question about it, without thinking."""
    turns = _about_story(rng)[:1]
    return "story-question", chat(turns, thinking=False, open_end=True), turns[0][2]
