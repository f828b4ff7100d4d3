"""Row counts that graphs are captured for.

Belongs here: sizes. Does not belong here: graphs.
"""

from __future__ import annotations

import bisect


def row_buckets(most: int) -> tuple[int, ...]:
    """Ascending buckets up to the first that holds `most` rows: every count to 8, then steps of an eighth or so.

    A padded row reads the experts that it is routed to, so few rows want tight buckets.
    """
    sizes = list(range(1, 9))
    for step, end in ((2, 16), (4, 32), (8, 64), (16, 128), (32, 1 << 20)):
        while sizes[-1] < end and sizes[-1] < most:
            sizes.append(sizes[-1] + step)
    return tuple(sizes[: bisect.bisect_left(sizes, most) + 1])


def fit(buckets: tuple[int, ...], rows: int) -> int | None:
    """The smallest bucket of at least `rows`, or None."""
    i = bisect.bisect_left(buckets, rows)
    return buckets[i] if i < len(buckets) else None
