"""Check a whole store: every record, key document, payload and array."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lenspool_cache.codec import DROPPED, Record
from lenspool_cache.errors import CacheCorrupt, CacheError
from lenspool_cache.keys import entry_key
from lenspool_cache.reader import PackReader
from lenspool_cache.scan import PackScan, finished, scan_pack
from lenspool_cache.store import Store

LEFTOVER_S = 3600  # younger temporary files may have a writer


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong: the file, the slot of its index (None: the whole file), and what it is."""

    file: str
    slot: int | None
    detail: str


@dataclass(slots=True)
class Report:
    """What `verify` found.

    Attributes
    ----------
    packs, records, payload_bytes, arrays
        What was checked.
    damaged
        What does not match its checksum or key.
    unfinished
        Records of puts that never became whole: a writer died, or is writing now.
    dropped
        Records that were dropped before.
    unindexed
        Sound records that the index does not know.
    stale
        Places in the index that no sound record stands behind.
    leftovers
        Temporary files that writers left when they died, older than an hour.
    repaired
        Whether damaged entries were dropped and the index was rebuilt.
    """

    packs: int = 0
    records: int = 0
    payload_bytes: int = 0
    arrays: int = 0
    damaged: list[Damage] = field(default_factory=list)
    unfinished: int = 0
    dropped: int = 0
    unindexed: int = 0
    stale: int = 0
    leftovers: int = 0
    repaired: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged and the index agrees with the packs."""
        return not (self.damaged or self.unindexed or self.stale)


def verify(store: Store, repair: bool = False) -> Report:
    """Walk all packs and arrays of a store and check everything in them.

    Parameters
    ----------
    repair
        Drop damaged entries and arrays, delete leftovers, and rebuild the index. The rows of sound entries are never
        touched.

    Raises
    ------
    CacheError
        `repair` on a read-only store.
    """
    if repair and store.read_only:
        raise CacheError(f"the store at {store.path} is open read-only and cannot be repaired")
    report = Report()
    indexed = {(place.pack, place.slot) for place in store._index.all()}
    scans: list[PackScan] = []
    damaged: set[tuple[str, int]] = set()
    for name in store._packs.names():
        try:
            reader = store._packs.get(name)
            scan = scan_pack(name, reader)
        except FileNotFoundError:
            continue  # evicted while we walk
        except (CacheCorrupt, OSError) as error:
            report.damaged.append(Damage(name, None, str(error)))
            continue
        report.packs += 1
        scans.append(scan)
        for damage in _check_pack(scan, reader, report):
            report.damaged.append(damage)
            if damage.slot is not None:
                damaged.add((name, damage.slot))
                if repair and damage.slot not in scan.torn:
                    reader.mark([damage.slot], DROPPED)
    _compare(report, scans, damaged, indexed)
    for digest in store._arrays.digests():
        report.arrays += 1
        try:
            store._arrays.get(digest)
        except KeyError:
            continue
        except CacheCorrupt as error:
            report.damaged.append(Damage(f"arrays/{digest}", None, str(error)))
            if repair:
                store._arrays.remove(digest)
    for path in _leftovers(store.path):
        report.leftovers += 1
        if repair:
            path.unlink(missing_ok=True)
    if repair:
        store._index.rebuild()
        report.repaired = True
    return report


def _leftovers(path: Path) -> Iterator[Path]:
    for folder in (path, path / "packs", path / "arrays"):
        for file in folder.glob(".*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime > LEFTOVER_S:
                    yield file


def _check_pack(scan: PackScan, reader: PackReader, report: Report) -> Iterator[Damage]:
    for slot in scan.torn:
        yield Damage(scan.pack, slot, "the record does not match its checksum")
    for slot, record in scan.records:
        report.records += 1
        if not record.live:
            report.dropped += 1
            continue
        detail = _check(record, reader)
        if detail:
            yield Damage(scan.pack, slot, detail)
        else:
            report.payload_bytes += reader.layout.nbytes(record)


def _check(record: Record, reader: PackReader) -> str | None:
    """What is wrong with a record, or None."""
    document, name = reader.document(record), reader.name(record)
    if document is None:
        return "the key document does not match its checksum"
    if name is None or entry_key(document, name) != record.key:
        return "the key is not that of the document and name beside it"
    if record.row + reader.layout.taken(record) > reader.layout.rows:
        return "the rows lie outside the pack"
    with contextlib.suppress(CacheCorrupt):
        if reader.read_into(record.row, reader.empty(record)) == record.checksum:
            return None
    return "the rows do not match their checksum"


def _compare(
    report: Report, scans: list[PackScan], damaged: set[tuple[str, int]], indexed: set[tuple[str, int]]
) -> None:
    whole = finished(scans)
    live = sum(record.live for scan in scans for _, record in scan.records)
    report.unfinished = live - len(whole)
    sound = {(pack, slot) for pack, slot, _ in whole} - damaged
    report.stale = len(indexed - sound)
    # Of rows that two writers stored at once the index keeps one place, and the other is no fault.
    known = {(record.key, record.start, record.rows) for pack, slot, record in whole if (pack, slot) in indexed & sound}
    report.unindexed = sum(
        (pack, slot) in sound and (record.key, record.start, record.rows) not in known for pack, slot, record in whole
    )
