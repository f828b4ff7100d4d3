"""The configuration called `small`: V4.1 with every layer kind, below ten megabytes in the real formats.

Belongs here: its numbers, and what they take from the tokenizer. Does not belong here: the text (prepare.py), training.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deepinfer.model.config import ModelConfig
from deepinfer.model.synthetic import tiny, with_engram
from deepinfer.text.tokenizer import Tokenizer, engram_token_map

NOISE, IMAGE = "<｜System｜>", "<｜deepseek_image｜>"


def small(tokenizer: str | Path) -> ModelConfig:
    """The config for a folder with tokenizer.json: vocabulary, control ids and Engram classes are the tokenizer's.

    The layer map is `tiny`'s: two window-only layers (one with Engram), two ratio-2 sources with a reader, a
    ratio-1 source with candidates, a re-indexer, readers, three draft stages. Window and top-k are short, so that a few
    hundred tokens need selection.
    """
    tok = Tokenizer(tokenizer)
    classes = int(engram_token_map(tok, tok.vocab_size).max()) + 1
    base = tiny()
    assert base.vision is not None
    base = replace(
        base,
        vocab_size=tok.vocab_size,
        hidden_size=192,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=64,
        o_lora_rank=64,
        max_position_embeddings=16384,
        rope_scaling=replace(base.rope_scaling, original_max_position_embeddings=1024),
        n_routed_experts=12,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        sliding_window=64,
        index_n_heads=8,
        index_head_dim=64,  # half of it is not rotated: content can be found at any distance
        index_topk=64,
        candidate_topk_blocks=256,  # of 8: the readers see 2,048 positions; how many needles each costs: NOTES.md
        candidate_block_size=8,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        engram_compressed_vocab_size=classes,
        dspark_noise_token_id=_id(tok, NOISE),
        dspark_markov_rank=64,
        dspark_n_routed_experts=4,
        image_token_id=_id(tok, IMAGE),
        vision=replace(base.vision, hidden_size=32, num_attention_heads=2, intermediate_size=64),
    )
    return with_engram(base, layer_ids=(1, 4), vocab_size=2000, n_heads=2, head_dim=32)


def _id(tok: Tokenizer, text: str) -> int:
    found = tok.token_to_id(text)
    if found is None:
        raise ValueError(f"{tok.path} has no token {text!r}: build it with recipes.small.tokenizer")
    return found
