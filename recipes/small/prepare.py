"""The corpus of the small model as token ids, its tokenizer, held-out prompts and needle cases.

Belongs here: files and their formats, the parallel run. Does not belong here: what documents say (mixture.py).

    python -m recipes.small.prepare --out DIR --tokens 30_000_000 --seed 0 --workers 16

writes into DIR, the same bytes for any number of workers:

train.bin, heldout.bin    uint16 little-endian ids; each document is BOS ... EOS
tokenizer.json, tokenizer_config.json
prompts.jsonl             held-out prompts: {"id", "kind", "prompt", "answer": text or null}
needle.jsonl              long recall cases: {"id", "kind", "prompt", "answer", "tokens", "distance"}
meta.json                 counts and shares per source and file, bytes per token, the command's arguments

Prompts spell out control tokens and leave out BOS: `deepinfer.text.tokenizer.Tokenizer.encode` gives the ids.
An answer is right when the greedy continuation, stripped, starts with it. Bits per byte of a file is its total
loss in bits (every id but the first predicted) divided by `bytes`, the UTF-8 bytes of its text without control
tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from recipes.small import dialogues, mixture, stories, tasks
from recipes.small import tokenizer as tok

CHUNK = 128  # documents a worker makes at a time
HELDOUT_TOKENS = 400_000
NEEDLES = ((1000, 20), (2000, 20), (4000, 20), (6000, 20))  # (tokens, cases) of each kind
PROMPTS = 240

_backend = None


def _encode(texts: list[str]) -> list[np.ndarray]:
    """uint16 ids of documents, BOS and EOS included."""
    global _backend
    if _backend is None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        _backend = tok.load()
    encoded = _backend.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array([tok.BOS_ID, *e.ids, tok.EOS_ID], np.uint16) for e in encoded]


def _text_bytes(text: str) -> int:
    return sum(len(piece.encode()) for piece in tok.split_control(text))


def _chunk(number: int, *, seed: int, split: str, phase: str) -> list[tuple[str, bytes, int]]:
    """(source, ids as bytes, text bytes) of the documents of one chunk."""
    documents = [mixture.document(seed, split, i, phase) for i in range(number * CHUNK, (number + 1) * CHUNK)]
    rows = zip(documents, _encode([d.text for d in documents]), strict=True)
    return [(d.source, ids.tobytes(), _text_bytes(d.text)) for d, ids in rows]


def _in_order(
    pool: ProcessPoolExecutor, seed: int, split: str, phase: str, ahead: int
) -> Generator[tuple[str, bytes, int], None, None]:
    """Documents of a split by index, for ever; `ahead` chunks are in the making."""
    work = partial(_chunk, seed=seed, split=split, phase=phase)
    waiting: deque[Future[list[tuple[str, bytes, int]]]] = deque(pool.submit(work, n) for n in range(ahead))
    number = ahead
    try:
        while True:
            yield from waiting.popleft().result()
            waiting.append(pool.submit(work, number))
            number += 1
    finally:
        for future in waiting:
            future.cancel()


def write_split(
    path: Path, pool: ProcessPoolExecutor, *, split: str, phase: str, seed: int, tokens: int, ahead: int
) -> dict[str, Any]:
    """Whole documents until there are at least `tokens` ids; returns what meta.json says about the file."""
    count: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    text: Counter[str] = Counter()
    rows = _in_order(pool, seed, split, phase, ahead)
    with path.open("wb") as file:
        for source, ids, size in rows:
            file.write(ids)
            documents[source] += 1
            count[source] += len(ids) // 2
            text[source] += size
            if count.total() >= tokens:
                break
    rows.close()
    sources = {
        name: {
            "documents": documents[name],
            "tokens": count[name],
            "share": round(count[name] / count.total(), 4),
            "bytes": text[name],
            "mean_tokens": round(count[name] / max(documents[name], 1), 1),
        }
        for name in mixture.PHASES[phase]
    }
    total, size = count.total(), text.total()
    return {
        "tokens": total,
        "documents": documents.total(),
        "bytes": size,
        "bytes_per_token": size / total,
        "sources": sources,
    }


def held_out_prompts(seed: int, count: int) -> list[dict[str, Any]]:
    """Prompts of every kind in turn, none of them a prefix that ends inside a word."""
    makers = (stories.prompt, dialogues.prompt, stories.prompt, dialogues.story_prompt, tasks.recall_prompt)
    rows = []
    for number in range(count):
        kind, prompt, answer = makers[number % len(makers)](mixture.generator(seed, "prompts", number))
        rows.append({"id": f"prompt-{number:03d}", "kind": kind, "prompt": prompt, "answer": answer})
    return rows


def needle_cases(seed: int, lengths: tuple[tuple[int, int], ...] = NEEDLES) -> list[dict[str, Any]]:
    """Long recall cases; `tokens` counts the prompt with BOS, `distance` the tokens from the needle to the end."""
    rows = []
    for tokens, cases in lengths:
        for kind in tasks.NEEDLE_KINDS:
            for number in range(cases):
                rng = mixture.generator(seed, f"needle-{kind}-{tokens}", number)
                prompt, answer, needle = tasks.needle(rng, kind, tokens)
                whole, tail = _encode([prompt, prompt[prompt.index(needle) :]])
                rows.append(
                    {
                        "id": f"{kind}-{tokens}-{number:02d}",
                        "kind": kind,
                        "prompt": prompt,
                        "answer": answer,
                        "tokens": len(whole) - 1,
                        "distance": len(tail) - 2,
                    }
                )
    return rows


def _write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def prepare(out: Path, *, tokens: int, heldout: int, seed: int, workers: int, phase: str = "main") -> dict[str, Any]:
    """Write everything; returns what meta.json holds."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(tok.FILE, out / "tokenizer.json")
    tok.write_config(out)
    meta: dict[str, Any] = {"seed": seed, "vocab_size": tok.VOCAB_SIZE, "dtype": "uint16", "files": {}}
    # spawn: the caller may hold CUDA or threads, which a fork would copy.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for split, amount in (("heldout", heldout), ("train", tokens)):
            name = f"{split}.bin"
            ahead = min(4 * workers, 1 + amount // (CHUNK * 300))
            part = phase if split == "train" else "main"  # held-out text is the same for every phase
            meta["files"][name] = write_split(
                out / name, pool, split=split, phase=part, seed=seed, tokens=amount, ahead=ahead
            )
    _write_jsonl(out / "prompts.jsonl", held_out_prompts(seed, PROMPTS))
    needles = needle_cases(seed)
    _write_jsonl(out / "needle.jsonl", needles)
    meta["prompts"], meta["needles"] = PROMPTS, len(needles)
    (out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", "utf-8")
    return meta


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=30_000_000, help="least number of training ids")
    parser.add_argument("--heldout", type=int, default=HELDOUT_TOKENS, help="least number of held-out ids")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phase", choices=mixture.PHASES, default="train", help="mixture of train.bin")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    begin = time.monotonic()
    sizes = {"tokens": args.tokens, "heldout": args.heldout}
    meta = prepare(args.out, **sizes, seed=args.seed, workers=args.workers, phase=args.phase)
    for name, file in meta["files"].items():
        counts = f"{file['tokens']:,} tokens, {file['documents']:,} documents"
        print(f"{name}: {counts}, {file['bytes_per_token']:.3f} bytes a token")
        for source, row in file["sources"].items():
            print(f"  {source:<12}{row['documents']:>9,} documents {row['tokens']:>12,} tokens {row['share']:>7.1%}")
    print(f"{time.monotonic() - begin:.1f} s with {args.workers} workers", file=sys.stderr)


if __name__ == "__main__":
    main()
