"""How many bytes a job takes, known before it runs: what its worker process holds until the rows are stored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lenspool import entries
from lenspool.card import HookInfo, ModelCard
from lenspool.errors import InvalidJob
from lenspool_cache import ranges as rg
from lenspool_cache.codec import dtype_of
from lenspool_cache.ranges import Range

JOB_BYTES = 4 * 2**30


def job_bytes(captures: Iterable[Mapping[str, Any]], card: ModelCard, length: int) -> dict[str, int]:
    """Entry or hook -> bytes of its rows, for the `captures` of a job document over `length` positions.

    Rows that a readout is computed from at the end of the job count under their hook; of logits, and of streams under
    the lens, only what was read from them is held.
    """
    sizes: dict[str, int] = {}
    sources: dict[str, list[Range]] = {}
    for group in captures:
        ranges = [(start, stop) for start, stop in group["ranges"]]
        for name in group["hooks"]:
            if not entries.is_readout(name):
                sources.setdefault(name, []).extend(rg.close(ranges, length))
                continue
            entry = entries.parse(name)
            sizes[name] = _bytes(entries.info(entry, card), rg.close(ranges, length), card, length)
            if not entry.in_step:
                sources.setdefault(entry.hook, []).extend(rg.close(entry.reads(ranges), length))
    for name, closed in sources.items():
        sizes[name] = _bytes(card.hooks[name], closed, card, length)
    return sizes


def _bytes(info: HookInfo, ranges: Sequence[Range], card: ModelCard, length: int) -> int:
    width = math.prod(dim or length for dim in info.dims) if 0 in info.dims else info.width
    return rg.count(rg.merge(ranges)) * width * dtype_of(info.dtype or card.dtype).itemsize


def check_bytes(captures: Iterable[Mapping[str, Any]], card: ModelCard, length: int) -> None:
    """Refuse a job that takes too much.

    Raises
    ------
    InvalidJob
        With the number of bytes and the hook that takes most.
    """
    sizes = job_bytes(captures, card, length)
    total = sum(sizes.values())
    if total > JOB_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        advice = "; of logits, lenspool.readouts gives what is needed of them" if largest == entries.LOGITS else ""
        raise InvalidJob(
            "hooks",
            f"the rows take {total} bytes, {sizes[largest]} of them for {largest}",
            f"at most {JOB_BYTES} in a job: ask for fewer hooks or positions{advice}",
        )
