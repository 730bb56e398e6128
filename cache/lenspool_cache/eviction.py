"""What goes from a store: entries and arrays that were used least recently, or those that are named."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lenspool_cache.codec import DROPPED, RECORD_SIZE, Record
from lenspool_cache.compact import Item
from lenspool_cache.errors import CacheCorrupt
from lenspool_cache.index import Place
from lenspool_cache.keys import run_key
from lenspool_cache.policy import Policy
from lenspool_cache.scan import finished, scan_all
from lenspool_cache.store import Store

_ARRAY_GRACE_NS = int(7200e9)  # an array used since then may be asked for by a job on its way; twice `arrays._TOUCH_S`


@dataclass(frozen=True, slots=True)
class Victims:
    """Records that are to go, by pack, and digests of arrays."""

    records: Mapping[str, Sequence[Item]]
    arrays: Sequence[str]

    def without(self, store: Store, kept: Collection[bytes]) -> Victims:
        """All but those whose entry or run is kept."""
        records = {
            pack: left
            for pack, items in self.records.items()
            if (left := [item for item in items if not _is_among(store, pack, item[1], kept)])
        }
        return Victims(records, [digest for digest in self.arrays if bytes.fromhex(digest) not in kept])


def choose(
    store: Store, live: Mapping[str, Sequence[Item]], policy: Policy, excess: int, kept: Collection[bytes]
) -> Victims:
    """Of the records that live in packs, and of all arrays, those that go: the least recently used first.

    Parameters
    ----------
    excess
        Bytes that must go, whatever their age.
    kept
        Keys of runs, entries and arrays that stay.
    """
    used, now = store._usage.all(), time.time_ns()
    last: dict[bytes, int] = {}
    holders: dict[bytes, list[tuple[str, Item]]] = defaultdict(list)
    for pack, items in live.items():
        for slot, record in items:
            if not _is_among(store, pack, record, kept):
                time_of = max(record.time, used.get(record.key, 0))
                last[record.key] = max(time_of, last.get(record.key, 0))
                holders[record.key].append((pack, (slot, record)))
    arrays: dict[bytes, tuple[str, int]] = {}
    for digest, (time_of, nbytes) in store._arrays.used().items():
        key = bytes.fromhex(digest)
        if key not in kept and now - time_of > _ARRAY_GRACE_NS:
            last[key], arrays[key] = time_of, (digest, nbytes)
    oldest = now - int((policy.max_age_s or 0) * 1e9)
    records: dict[str, list[Item]] = defaultdict(list)
    gone: list[str] = []
    freed = 0
    for key in sorted(last, key=last.__getitem__):
        if freed >= excess and (policy.max_age_s is None or last[key] >= oldest):
            break
        if key in arrays:
            digest, nbytes = arrays[key]
            gone.append(digest)
            freed += nbytes
        for pack, item in holders[key]:
            records[pack].append(item)
            freed += disk_bytes(store, pack, [item])
    return Victims(records, gone)


def evict(store: Store, keys: Iterable[bytes]) -> int:
    """Drop entries by entry or run key, pinned or not; returns how many segments. `collect` gives their space back."""
    store.require_writable()
    wanted, dropped = set(keys), 0
    with store.errors(0):
        for pack, items in by_pack(finished(list(scan_all(store._packs)))).items():
            chosen = [item for item in items if _is_among(store, pack, item[1], wanted)]
            drop(store, pack, chosen)
            dropped += len(chosen)
    return dropped


def by_pack(whole: Iterable[tuple[str, int, Record]]) -> dict[str, list[Item]]:
    """Records with their slots, by the name of their pack."""
    packs: dict[str, list[Item]] = defaultdict(list)
    for pack, slot, record in whole:
        packs[pack].append((slot, record))
    return packs


def disk_bytes(store: Store, pack: str, items: Iterable[Item]) -> int:
    """What records of a pack take on the disk, with their rows and key documents."""
    layout = store._packs.get(pack).layout
    documents: dict[int, int] = {}
    total = 0
    for _, record in items:
        documents[record.document_offset] = record.document_length
        total += layout.nbytes(record) + RECORD_SIZE + record.name_length
    return total + sum(documents.values())


def drop(store: Store, pack: str, items: Sequence[Item]) -> None:
    """The index first: who asks it from now on misses, and who asked it before finds the mark."""
    if not items:
        return
    store._index.drop([Place(r.key, r.start, r.rows, pack, slot) for slot, r in items])
    with contextlib.suppress(FileNotFoundError):
        reader = store._packs.get(pack)
        reader.mark([slot for slot, _ in items], DROPPED)


def _is_among(store: Store, pack: str, record: Record, keys: Collection[bytes]) -> bool:
    """Whether the entry of a record, or its run, is among some keys."""
    return record.key in keys or (bool(keys) and _run_of(store, pack, record) in keys)


def _run_of(store: Store, pack: str, record: Record) -> bytes | None:
    try:
        document = store._packs.get(pack).document(record)
    except (CacheCorrupt, OSError):
        return None
    return None if document is None else run_key(document)
