"""The little world of the stories: who lives in it, where, and with what.

Belongs here: tables of names, animals, places and things, and how to choose from them.
Does not belong here: sentences and plots (stories.py).

Lists stand in order of preference: `lean` takes the first entries more often, so that a greedy model has a
clear favourite wherever the language leaves a choice, and a sampling model still meets every entry.
"""

# ruff: noqa: E501  (tables read better as rows)
from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


def lean(rng: random.Random, options: Sequence[T]) -> T:
    """One of the options; of n, the first has probability n^-1/2 and the others fall off smoothly."""
    return options[int(len(options) * rng.random() ** 2)]


def an(noun: str) -> str:
    """The noun with its indefinite article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


class Noun(str):
    """A noun without its article."""

    __slots__ = ()

    @property
    def a(self) -> str:
        return an(self)

    @property
    def the(self) -> str:
        return f"the {self}"

    @property
    def T(self) -> str:
        return " ".join(word if word in ("of", "and") else word.capitalize() for word in self.split(" "))


@dataclass(frozen=True, slots=True)
class Who:
    """A character and the pronouns that go with it. `kind` is a noun such as "fox" or "girl"."""

    name: str
    kind: str
    he: str
    him: str
    his: str

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:
        return self.he.capitalize()

    @property
    def His(self) -> str:
        return self.his.capitalize()

    @property
    def Name(self) -> str:
        return self.name[0].upper() + self.name[1:]

    @property
    def self(self) -> str:
        return "himself" if self.he == "he" else "herself"


def who(name: str, kind: str, girl: bool) -> Who:
    """A character with her or his pronouns."""
    return Who(name, kind, "she", "her", "her") if girl else Who(name, kind, "he", "him", "his")


GIRLS = (
    "Mia", "Lily", "Anna", "Rosa", "Sara", "Emma", "Nora", "Ella", "Lucy", "Maya", "Ivy", "Zoe", "Clara", "Ruby",
    "Alice", "Hana", "Lena", "Tess", "Molly", "Grace", "Daisy", "Jane", "Kate", "Eva",
)  # fmt: skip
BOYS = (
    "Tom", "Ben", "Leo", "Max", "Sam", "Jack", "Tim", "Finn", "Noah", "Oscar", "Adam", "Theo", "Luke", "Paul",
    "Hugo", "Peter", "Omar", "Kai", "Dan", "Nico", "Eli", "Jon", "Will", "Mark",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Animal:
    """A kind of animal: its names (girls', boys'), home ("in a den"), food, way of moving, and what it is good at."""

    girls: tuple[str, ...]
    boys: tuple[str, ...]
    home: str
    food: str
    moved: str
    skill: str
    look: str


ANIMALS: dict[str, Animal] = {
    "rabbit": Animal(("Poppy", "Clover", "Bella"), ("Benny", "Thumper", "Hop"), "in a cozy burrow under the hill", "carrots", "hopped", "run very fast", "long soft ears"),
    "fox": Animal(("Ruby", "Amber", "Fern"), ("Rusty", "Felix", "Red"), "in a warm den under an old oak tree", "berries", "trotted", "find things by their smell", "a bushy red tail"),
    "bear": Animal(("Honey", "Martha", "Olga"), ("Bruno", "Barney", "Bo"), "in a dry cave by the waterfall", "honey", "walked", "lift heavy things", "thick brown fur"),
    "mouse": Animal(("Minnie", "Pip", "Tilly"), ("Milo", "Nibbles", "Squeak"), "in a tiny house under the stairs", "cheese", "scurried", "fit into very small places", "a long thin tail"),
    "cat": Animal(("Luna", "Misty", "Cleo"), ("Oliver", "Tiger", "Smoky"), "in a little house with a red door", "fish", "crept", "climb tall trees", "bright green eyes"),
    "dog": Animal(("Lola", "Penny", "Bonnie"), ("Buddy", "Rex", "Spot"), "in a wooden house in the yard", "bones", "ran", "follow any track", "a wagging tail"),
    "duck": Animal(("Dora", "Pearl", "Goldie"), ("Dilly", "Quill", "Puddle"), "in a nest of reeds beside the pond", "bread crumbs", "waddled", "swim across the water", "shiny yellow feathers"),
    "frog": Animal(("Lotta", "Jade", "Dotty"), ("Freddy", "Hopper", "Croaky"), "on a green lily pad in the pond", "fat flies", "jumped", "jump very high", "smooth green skin"),
    "owl": Animal(("Olivia", "Stella", "Willow"), ("Otto", "Hoot", "Oswald"), "in a hollow tree at the top of the hill", "nuts and seeds", "flew", "see in the dark", "big round eyes"),
    "squirrel": Animal(("Hazel", "Nutty", "Maple"), ("Chip", "Sammy", "Acorn"), "in a round nest high in a tree", "nuts", "leaped", "jump from branch to branch", "a fluffy tail"),
    "hedgehog": Animal(("Holly", "Hetty", "Bramble"), ("Henry", "Spike", "Hugo"), "under a pile of dry leaves behind the barn", "apples", "shuffled", "roll into a ball", "a coat of sharp spines"),
    "turtle": Animal(("Tina", "Shelly", "Myrtle"), ("Toby", "Terry", "Sheldon"), "in a quiet spot by the river", "green leaves", "crawled", "wait without getting tired", "a hard round shell"),
}  # fmt: skip
KINDS = tuple(ANIMALS)


@dataclass(frozen=True, slots=True)
class Place:
    """Where stories happen: "in the forest", what is seen there, where to look, what can be picked up, who lives there."""

    at: str
    to: str
    sights: tuple[str, ...]
    spots: tuple[str, ...]
    finds: tuple[str, ...]
    kinds: tuple[str, ...]


PLACES: dict[str, Place] = {
    "forest": Place("in the forest", "to the forest", ("The trees were tall and green.", "Birds sang in the branches.", "The sun shone through the leaves."), ("under the old oak tree", "behind a mossy rock", "between the roots of a tree", "in a pile of leaves"), ("smooth acorn", "blue feather", "pine cone", "red mushroom"), ("fox", "bear", "squirrel", "owl", "hedgehog", "rabbit")),
    "park": Place("in the park", "to the park", ("The grass was soft and green.", "Children played on the swings.", "The flowers were yellow and red."), ("under the bench", "behind the slide", "next to the big tree", "near the fountain"), ("shiny coin", "little flag", "round stone", "yellow leaf"), ("dog", "squirrel", "duck", "cat")),
    "beach": Place("at the beach", "to the beach", ("The waves were small and blue.", "The sand was warm and soft.", "Gulls flew over the water."), ("under a striped towel", "behind the big rock", "next to the sand castle", "in an old boat"), ("pink shell", "green bottle", "white stone", "starfish"), ("turtle", "dog", "duck", "cat")),
    "garden": Place("in the garden", "to the garden", ("The roses were in bloom.", "Bees hummed around the flowers.", "The apples on the tree were ripe."), ("under the rose bush", "behind the shed", "next to the watering can", "among the carrots"), ("tiny seed", "white flower", "snail shell", "red apple"), ("cat", "mouse", "hedgehog", "rabbit")),
    "farm": Place("on the farm", "to the farm", ("The cows stood in the field.", "A rooster crowed on the fence.", "The barn was big and red."), ("behind the barn", "under the wagon", "in the hay", "next to the water pump"), ("brown egg", "old horseshoe", "soft feather", "golden straw"), ("dog", "mouse", "duck", "cat")),
    "pond": Place("by the pond", "to the pond", ("The water was clear and still.", "Dragonflies flew over the reeds.", "Lily pads floated on the water."), ("among the reeds", "under the wooden bridge", "behind a big stone", "next to the lily pads"), ("flat stone", "long reed", "silver shell", "white feather"), ("duck", "frog", "turtle", "mouse")),
    "meadow": Place("in the meadow", "to the meadow", ("The grass was full of flowers.", "Butterflies danced in the air.", "A soft wind moved the grass."), ("in the tall grass", "behind a yellow bush", "next to a mole hill", "under a big leaf"), ("blue flower", "four-leaf clover", "striped feather", "round pebble"), ("rabbit", "hedgehog", "fox", "mouse")),
    "hill": Place("on the hill", "to the hill", ("The wind was fresh and strong.", "The village looked tiny from up there.", "White clouds sailed across the sky."), ("behind the stone wall", "under a thorn bush", "next to the old tower", "in the soft grass"), ("shiny pebble", "gray feather", "old key", "white stone"), ("rabbit", "owl", "fox", "bear")),
    "village": Place("in the village", "to the village", ("The houses were small and neat.", "Smoke rose from the chimneys.", "The baker put fresh bread in the window."), ("behind the bakery", "under the market table", "next to the well", "near the church steps"), ("copper coin", "brass button", "blue ribbon", "small bell"), ("dog", "cat", "mouse", "duck")),
}  # fmt: skip

TRAITS = ("kind", "curious", "brave", "cheerful", "shy", "clever", "gentle", "playful")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
MORALS = {
    "help": ("It feels good to help a friend.", "A kind heart makes the world brighter.", "When we help each other, everything is easier."),
    "share": ("Sharing makes every treat taste better.", "There is always enough when friends share."),
    "try": ("If you try again and again, you can do it.", "A good thing takes time."),
    "truth": ("It is always better to tell the truth.", "The truth makes a heavy heart light."),
    "brave": ("Being brave means trying even when you are afraid.", "Little steps can take you far."),
    "friend": ("A new friend can be waiting around the next corner.", "A friend is the best thing to find."),
    "humble": ("It is better to be kind than to be first.", "Slow and steady is a good way to go."),
    "home": ("There is no place like home.", "The best part of a trip is coming home."),
}  # fmt: skip

# Values of recall tasks: short, common, unlike names.
WORDS = (
    "apple", "basket", "bell", "boat", "bottle", "branch", "bread", "bridge", "brush", "bucket", "button", "cake", "candle",
    "carrot", "castle", "chair", "cherry", "clock", "cloud", "coin", "cookie", "corn", "cup", "door", "dragon", "drum", "eagle",
    "egg", "feather", "fence", "fish", "flag", "flower", "garden", "glass", "glove", "grape", "hammer", "hat", "honey", "horse",
    "island", "jacket", "kettle", "key", "kite", "ladder", "lamp", "lantern", "leaf", "lemon", "letter", "lion", "map", "melon",
    "milk", "mirror", "monkey", "moon", "mountain", "needle", "nest", "nut", "ocean", "onion", "orange", "paint", "paper",
    "pear", "pencil", "piano", "pillow", "plum", "potato", "pumpkin", "puzzle", "queen", "ribbon", "ring", "river", "rocket",
    "rope", "rose", "salt", "sand", "scarf", "seed", "shell", "ship", "shoe", "silver", "snow", "soap", "spoon", "star",
    "stone", "storm", "sugar", "sun", "table", "tent", "tiger", "tower", "train", "tree", "tulip", "violin", "wagon", "wheel",
    "whistle", "window", "wolf", "wood", "zebra",
)  # fmt: skip
_SYLLABLES = (
    "ba",
    "be",
    "da",
    "do",
    "fa",
    "fi",
    "ga",
    "jo",
    "ka",
    "ki",
    "la",
    "lo",
    "ma",
    "mi",
    "na",
    "ne",
    "no",
    "pa",
    "ra",
    "ri",
    "ro",
    "sa",
    "so",
    "ta",
    "ti",
    "va",
    "vi",
    "za",
)
_ENDS = ("n", "l", "ra", "na", "lo", "mi", "ko", "s", "ta", "ri")


def new_name(rng: random.Random) -> str:
    """A name nobody has in the tables, such as "Mirona": it can only be copied."""
    return (rng.choice(_SYLLABLES) + rng.choice(_SYLLABLES) + rng.choice(_ENDS)).capitalize()


def any_name(rng: random.Random) -> str:
    """A name for recall tasks: half of them from the tables, half made up."""
    return rng.choice(GIRLS + BOYS) if rng.random() < 0.5 else new_name(rng)
