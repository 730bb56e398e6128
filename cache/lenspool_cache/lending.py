"""Rows that runs which begin alike lend each other: where they are looked for, and how far they are believed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from lenspool_cache.errors import CacheCorrupt
from lenspool_cache.index import Block, Place
from lenspool_cache.keys import Run, entry_of, run_key
from lenspool_cache.prefix import BLOCK, common, reach
from lenspool_cache.reader import PackPool


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


Sources = Mapping[bytes, Source]
"""By their entries' keys."""


def own(run: Run, names: Iterable[str]) -> dict[bytes, Source]:
    """A run's own entries: the document beside them is the run's, or another's."""

    def limit(document: bytes) -> int | None:
        return sys.maxsize if document == run.data else None

    return {run.entry(name): Source(name, run.key, run.entry(name), limit) for name in names}


def borrowed(run: Run, lenders: Iterable[bytes], names: Iterable[str]) -> dict[bytes, Source]:
    """Entries of other runs, by their keys, that may have rows of a run."""
    alike: dict[bytes, int] = {}

    def limit(lender: bytes, ahead: int, document: bytes) -> int | None:
        if run_key(document) != lender:
            return None
        if lender not in alike:
            alike[lender] = common(json.loads(document), run.document)
        return alike[lender] - ahead

    reaches = [(name, ahead) for name in names if (ahead := reach(name)) is not None]
    return {
        (key := entry_of(lender, name)): Source(name, lender, key, partial(limit, lender, ahead))
        for lender in lenders
        for name, ahead in reaches
    }


def runs_at(packs: PackPool, places: Iterable[Place], *, lent: bool = False) -> Iterator[tuple[Place, str, Run]]:
    """Places with the names and runs that stand in the packs, or only those that may be `lent`.

    Without those that cannot be read.
    """
    runs: dict[tuple[str, int], Run | None] = {}
    for place in places:
        try:
            reader = packs.get(place.pack)
            record = reader.records([place.slot])[0]
            name = None if record is None else reader.name(record)
            if record is None or name is None or (lent and reach(name) is None):
                continue
            at = place.pack, record.document_offset
            if at not in runs:
                document = reader.document(record)
                runs[at] = None if document is None else Run.stored(document)
        except (CacheCorrupt, OSError):
            continue
        if (run := runs[at]) is not None:
            yield place, name, run


def blocks_at(packs: PackPool, places: Iterable[Place]) -> Iterator[Block]:
    """The blocks of which there are rows, at some places, that may be lent."""
    return blocks_of(runs_at(packs, places, lent=True))


def blocks_of(found: Iterable[tuple[Place, str, Run]]) -> Iterator[Block]:
    """As `blocks_at`, of places whose names and runs are known."""
    seen: set[Block] = set()
    for place, name, run in found:
        if reach(name) is None:
            continue
        for i in range(place.start // BLOCK, min(-(-(place.start + place.rows) // BLOCK), len(run.blocks))):
            block = Block(run.blocks[i], run.key, place.pack)
            if block not in seen:
                seen.add(block)
                yield block
