"""Walk the packs for their records: the packs are the truth, the index only a way to find things in them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from lenspool_cache.codec import EMPTY_RECORD, RECORD_SIZE, WHOLE, Record, unpack_record
from lenspool_cache.errors import CacheCorrupt
from lenspool_cache.reader import PackPool, PackReader

log = logging.getLogger(__name__)

_CHUNK = 8192
_EMPTY_CHUNK = EMPTY_RECORD * _CHUNK


@dataclass(slots=True)
class PackScan:
    """What stands in the index of one pack: whole records by slot, and slots whose record is torn or damaged."""

    pack: str
    records: list[tuple[int, Record]] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)


def scan_pack(name: str, reader: PackReader, first: int = 0, *, to_the_end: bool = True) -> PackScan:
    """Read the records of a pack.

    Parameters
    ----------
    first
        Slot to begin at.
    to_the_end
        Read all of the index. Else stop where thousands of slots are empty: a failed put leaves no larger gap, unless
        it was as large.
    """
    found = PackScan(name)
    for at in range(first, reader.layout.records, _CHUNK):
        count = min(_CHUNK, reader.layout.records - at)
        data = reader.index(at, count)
        if data == _EMPTY_CHUNK[: len(data)]:
            if to_the_end:
                continue
            break
        for i in range(count):
            item = data[i * RECORD_SIZE : (i + 1) * RECORD_SIZE]
            if item == EMPTY_RECORD:
                continue
            record = unpack_record(item)
            if record is None:
                found.torn.append(at + i)
            else:
                found.records.append((at + i, record))
    return found


def scan_all(pool: PackPool) -> Iterator[PackScan]:
    """Scan every readable pack; one that is gone or damaged is logged and left out."""
    for name in pool.names():
        try:
            yield scan_pack(name, pool.get(name))
        except FileNotFoundError:
            continue  # evicted meanwhile
        except (CacheCorrupt, OSError) as error:
            log.warning("pack %s left out: %s", name, error)


def finished(scans: list[PackScan]) -> list[tuple[str, int, Record]]:
    """(pack, slot, record) of all live records of whole puts, oldest first.

    A put whose writer died before its last record is not whole; none of its records counts.
    """
    sizes = Counter(record.batch for scan in scans for _, record in scan.records)
    live = [
        (scan.pack, slot, record)
        for scan in scans
        for slot, record in scan.records
        if record.state == WHOLE or (record.live and sizes[record.batch] == record.batch_size)
    ]
    return sorted(live, key=lambda item: item[2].time)
