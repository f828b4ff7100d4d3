"""Which document stands at which index: the mixture of sources, a pure function of (seed, split, index).

Belongs here: shares of the sources and the long documents' place among them.
Does not belong here: how a source makes its text (stories.py, dialogues.py, tasks.py), ids and files (prepare.py).

`python -m recipes.small.mixture` prints the first documents of each source; samples/documents.txt holds what it prints.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass

from recipes.small import dialogues, stories, tasks

# source -> (documents in a thousand, maker). meta.json reports the share of tokens that comes of it.
SOURCES: dict[str, tuple[int, Callable[[random.Random], str]]] = {
    "story": (420, stories.document),
    "dialogue": (330, dialogues.document),
    "story_chat": (110, dialogues.story_document),
    "recall": (125, tasks.recall_document),
    "long": (15, tasks.long_document),
}
# The training text also asks for much that stands far above. The tokenizer's and the held-out text do not.
TRAIN = SOURCES | {"lookup": (45, tasks.lookup_document)}
PHASES = {"main": SOURCES, "train": TRAIN}


@dataclass(frozen=True)
class Document:
    """A document: control tokens are spelled out in the text; BOS in front and EOS at the end are not in it."""

    source: str
    text: str


def generator(seed: int, split: str, index: int) -> random.Random:
    """The random numbers of one document. Text seeds hash the same in every process and Python version."""
    return random.Random(f"{seed}/{split}/{index}")


def document(seed: int, split: str, index: int, phase: str = "main") -> Document:
    """The document at `index` of a split ("train", "heldout", "tokenizer")."""
    rng, sources = generator(seed, split, index), PHASES[phase]
    source = rng.choices(tuple(sources), [weight for weight, _ in sources.values()])[0]
    return Document(source, sources[source][1](rng))


def samples(each: int, *, seed: int = 0, longest: int = 1500) -> str:
    """The first documents of every source, the long ones shortened in the middle."""
    left = dict.fromkeys(SOURCES, each)
    index, shown = 0, []
    while any(left.values()):
        made = document(seed, "samples", index)
        if left[made.source]:
            left[made.source] -= 1
            text = made.text
            if len(text) > longest:
                text = f"{text[: longest // 2]}\n[... {len(text) - longest} characters ...]\n{text[-longest // 2 :]}"
            shown.append(f"===== {made.source} {index} =====\n{text}\n")
        index += 1
    return "\n".join(shown)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print documents of each source.")
    parser.add_argument("--each", type=int, default=2)
    print(samples(parser.parse_args().each), end="")
