"""How large the cache pools are: from options, the model's record sizes and the memory that is free.

Belongs here: arithmetic over bytes, the start-up log of every byte. Does not belong here: tensors
(model/state.py makes them), record layouts (ops/records.py), who gets which page (pages.py).
Sizes count what users ask for; number 0 of pages and slots comes on top (padding rows point at it).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from deepinfer.cache.pages import pages_for
from deepinfer.errors import ConfigError

logger = logging.getLogger(__name__)

FREE_SHARE = 4  # by default the cache takes at most a quarter of the free memory:
DEFAULT_CAP = 1 << 30  # ... and at most 1 GiB, which is 1.2 M tokens of the released model (890 B a token)


@dataclass(frozen=True)
class PoolSizes:
    """Usable pages and slots (without number 0), tokens per page, the context limit that follows, bytes of
    each group.
    """

    num_pages: int
    num_slots: int
    page_size: int
    max_model_len: int
    page_bytes: int
    slot_bytes: int

    @property
    def max_pages(self) -> int:
        """Pages of the longest request: the width of the page table."""
        return pages_for(self.max_model_len, self.page_size)

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def total_bytes(self) -> int:
        return (self.num_pages + 1) * self.page_bytes + (self.num_slots + 1) * self.slot_bytes

    def log(self) -> None:
        pages, slots = (self.num_pages + 1) * self.page_bytes, (self.num_slots + 1) * self.slot_bytes
        logger.info(
            "cache: %d pages of %d tokens (%d B each) %s; %d request slots (%d B each) %s; max_model_len %d",
            *(self.num_pages, self.page_size, self.page_bytes, human(pages)),
            *(self.num_slots, self.slot_bytes, human(slots), self.max_model_len),
        )


def size_pools(
    *,
    page_bytes: int,
    slot_bytes: int,
    page_size: int,
    max_num_seqs: int,
    model_limit: int,
    max_model_len: int | None,
    num_pages: int | None,
    memory_bytes: int | None,
    free_bytes: int,
) -> PoolSizes:
    """Sizes of the pools; ConfigError names what does not fit.

    num_pages wins over memory_bytes (pages and slots together), which wins over the default: what
    max_num_seqs requests of the longest length need, at most a quarter of free_bytes and 1 GiB. max_model_len
    None becomes the smaller of the model's limit and the pool; an explicit one may exceed the pool (requests
    that do not fit are refused one by one).
    """
    if max_model_len is not None and max_model_len > model_limit:
        raise ConfigError(f"max_model_len is {max_model_len}, but this model has {model_limit} positions; lower it")
    slots = (max_num_seqs + 1) * slot_bytes
    if num_pages is None and memory_bytes is not None:
        num_pages = (memory_bytes - slots) // page_bytes - 1
        if num_pages < 1:
            least = slots + 2 * page_bytes
            raise ConfigError(
                f"kv_cache_memory_bytes is {memory_bytes}, but one page and {max_num_seqs} request slots "
                f"need {least}: raise it or lower max_num_seqs"
            )
    if num_pages is None:
        cap = min(free_bytes // FREE_SHARE, DEFAULT_CAP) - slots
        wanted = max_num_seqs * pages_for(max_model_len or model_limit, page_size)
        num_pages = max(min(wanted, cap // page_bytes - 1), min(wanted, 1))
        if (num_pages + 1) * page_bytes + slots > free_bytes:
            raise ConfigError(
                f"one page and {max_num_seqs} request slots need {human(slots + 2 * page_bytes)}, "
                f"{human(free_bytes)} are free: lower max_num_seqs"
            )
    limit = max_model_len or min(model_limit, num_pages * page_size)
    sizes = PoolSizes(num_pages, max_num_seqs, page_size, limit, page_bytes, slot_bytes)
    if sizes.total_bytes > free_bytes:  # said here, because the system would end the process without a word
        raise ConfigError(
            f"{num_pages} pages and {max_num_seqs} request slots need {human(sizes.total_bytes)}, "
            f"{human(free_bytes)} are free: lower num_pages, kv_cache_memory_bytes or max_num_seqs"
        )
    if limit > sizes.num_tokens:
        logger.warning(
            "max_model_len %d exceeds the pool of %d tokens; longer requests are refused",
            limit,
            sizes.num_tokens,
        )
    return sizes


def human(size: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
