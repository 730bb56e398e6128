"""Rows that runs which begin alike lend each other: where they are looked for, and how far they are believed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from lenspool_cache.index import Block, Place
from lenspool_cache.keys import Run, entry_of, run_key
from lenspool_cache.prefix import BLOCK, common, reach


@dataclass(frozen=True, slots=True)
class Source:
    """An entry in which rows are looked for.

    Attributes
    ----------
    name, run, entry
        What it is called, and the keys of its run and of itself.
    limit
        Key document beside its rows -> position from which on they are not those that are asked for; None where the
        document is not that of its run.
    """

    name: str
    run: bytes
    entry: bytes
    limit: Callable[[bytes], int | None]


def own(run: Run) -> Callable[[bytes], int | None]:
    """The limit of a run's own entries: the document is the run's, or another's."""
    return lambda document: sys.maxsize if document == run.data else None


def borrowed(run: Run, lenders: Iterable[bytes], names: Iterable[str]) -> list[Source]:
    """Entries of other runs, by their keys, that may have rows of a run."""
    alike: dict[bytes, int] = {}

    def limit(lender: bytes, ahead: int, document: bytes) -> int | None:
        if run_key(document) != lender:
            return None
        if lender not in alike:
            alike[lender] = common(json.loads(document), run.document)
        return alike[lender] - ahead

    reaches = [(name, ahead) for name in names if (ahead := reach(name)) is not None]
    return [
        Source(name, lender, entry_of(lender, name), partial(limit, lender, ahead))
        for lender in lenders
        for name, ahead in reaches
    ]


def blocks_of(run: Run, names: Iterable[str], places: Iterable[Place]) -> Iterator[Block]:
    """The blocks of a run of which there are rows at some places, of entries with these names, that it may lend."""
    lent = {run.entry(name) for name in names if reach(name) is not None}
    seen: set[tuple[str, int]] = set()
    for place in (place for place in places if place.key in lent):
        for i in range(place.start // BLOCK, min(-(-(place.start + place.rows) // BLOCK), len(run.blocks))):
            if (place.pack, i) not in seen:
                seen.add((place.pack, i))
                yield Block(run.blocks[i], run.key, place.pack)
