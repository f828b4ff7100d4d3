"""Byte-level BPE of 2048 ids with the control tokens of DeepSeek-V4.1 in the roles of the synthetic checkpoints.

Belongs here: training it on a fixed sample, the ids of its control tokens, its two files.
Does not belong here: what the sample says (stories.py, dialogues.py, tasks.py).

`python -m recipes.small.tokenizer` rebuilds recipes/small/tokenizer.json byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
FILE = HERE / "tokenizer.json"
VOCAB_SIZE = 2048
MAX_LENGTH = 8192
SAMPLE_SEED, SAMPLE_DOCUMENTS = 0, 6_000

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, SYSTEM = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
THINK, END_THINK = "<think>", "</think>"
IMAGE = "<｜deepseek_image｜>"
FIRST = (BOS, EOS, PAD)  # ids 0, 1, 2
LAST = (  # the last ids, in this order; the draft's noise token shares the id of <｜System｜>
    USER,
    ASSISTANT,
    THINK,
    END_THINK,
    "｜DSML｜",
    "<｜place▁holder▁no▁0｜>",
    "<｜place▁holder▁no▁1｜>",
    "<｜place▁holder▁no▁2｜>",
    IMAGE,
    SYSTEM,
)
BOS_ID, EOS_ID, PAD_ID = range(3)
IMAGE_ID, SYSTEM_ID = VOCAB_SIZE - 2, VOCAB_SIZE - 1
NOISE_ID = SYSTEM_ID
CONTROL = FIRST + LAST

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "clean_up_tokenization_spaces": False,
    "model_max_length": MAX_LENGTH,
}


def split_control(text: str) -> Iterator[str]:
    """The stretches of ordinary text between control tokens."""
    for control in CONTROL:
        text = text.replace(control, "\0")
    return (piece for piece in text.split("\0") if piece)


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer from documents. The same documents in the same order give the same file."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer(models.BPE())
    # One digit a token (with the blank before it), so that sums can be learnt; the rest as GPT-2 splits it.
    digits = pre_tokenizers.Split(Regex(r" ?\p{N}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(LAST),
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in FIRST],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in split_control(text)), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in LAST])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the sample gives {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}: use a larger sample")
    return tokenizer


def load(path: Path = FILE) -> Tokenizer:
    """The shipped tokenizer."""
    return Tokenizer.from_file(str(path))


def write_config(folder: Path) -> None:
    """tokenizer_config.json beside a tokenizer.json."""
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=2, ensure_ascii=False) + "\n", "utf-8")


def main() -> None:
    """Train on the fixed sample and write the file."""
    from recipes.small.mixture import document

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE)
    out: Path = parser.parse_args().out
    texts = (document(SAMPLE_SEED, "tokenizer", index).text for index in range(SAMPLE_DOCUMENTS))
    out.write_text(train(texts).to_str(pretty=False), "utf-8")
    print(f"{out}: {out.stat().st_size} bytes, {VOCAB_SIZE} tokens")


if __name__ == "__main__":
    main()
