"""Keep a store within its policy, and give back the space of what is gone.

Packs are never changed in place but in the state of records. What stays of a pack is copied to a new one, and the old
file is unlinked: whoever has it open reads on, and the disk gets its space when the last one closes it. Only packs
without a writer are touched. So packs that dead writers left partly filled are joined here, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from lenspool_cache.codec import WHOLE, Record
from lenspool_cache.compact import copy_items
from lenspool_cache.errors import CacheCorrupt, CacheError
from lenspool_cache.eviction import by_pack, choose, disk_bytes, drop
from lenspool_cache.index import Place
from lenspool_cache.lending import runs_at
from lenspool_cache.locks import locked
from lenspool_cache.pack import is_sealed
from lenspool_cache.policy import Policy
from lenspool_cache.scan import finished, scan_all
from lenspool_cache.store import Store
from lenspool_cache.writing import Writers

log = logging.getLogger(__name__)

_ROUNDS = 3
_LOW_WATER = 0.9  # of the size limit: down to here, so that not each put evicts again
_SKELETON = 96 << 10  # what an empty pack may take on the disk
_DEAD_SHARE = 0.25  # of a pack, from which it is worth a copy of the rest
_SMALL_PACK, _SMALL_PACKS = 4 << 20, 4  # so many packs that hold so little are joined


@dataclass(slots=True)
class Collected:
    """What a collection did.

    Attributes
    ----------
    busy
        Another process collects at the moment; nothing was done.
    evicted, evicted_bytes
        Segments that were evicted, and their rows' bytes.
    arrays
        Arrays that were evicted.
    packs_removed, moved_bytes
        Packs that were removed, and bytes of rows that were copied out of them before.
    before_bytes, after_bytes
        What the store took on the disk.
    """

    busy: bool = False
    evicted: int = 0
    evicted_bytes: int = 0
    arrays: int = 0
    packs_removed: int = 0
    moved_bytes: int = 0
    before_bytes: int = 0
    after_bytes: int = 0


def collect(store: Store, policy: Policy | None = None, *, bytes_per_s: float | None = None) -> Collected:
    """Evict what the policy does not allow, least recently used first, and compact.

    Parameters
    ----------
    policy
        Limits; default: the store's own.
    bytes_per_s
        Copy no faster than this.

    Raises
    ------
    CacheError
        The store is read-only, or cannot be written to.
    """
    store.require_writable()
    policy = policy or store.policy
    with store.errors(0), _alone(store) as alone:
        if not alone:
            return Collected(busy=True)
        report = Collected(before_bytes=store.disk_bytes())
        for _ in range(_ROUNDS):
            removed = report.packs_removed
            _Round(store, policy, report, bytes_per_s).run()
            report.after_bytes = store.disk_bytes()
            over = policy.max_bytes is not None and report.after_bytes > policy.max_bytes
            if not over or report.packs_removed == removed:
                break
        store._index.forget_unused()
        return report


@contextlib.contextmanager
def _alone(store: Store) -> Iterator[bool]:
    try:
        with locked(store.path / "collect.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield True
    except BlockingIOError:
        yield False


class _Round:
    def __init__(self, store: Store, policy: Policy, report: Collected, bytes_per_s: float | None) -> None:
        self.store, self.policy, self.report, self.bytes_per_s = store, policy, report, bytes_per_s
        names = store._packs.names()
        self.sealed = [name for name in names if is_sealed(store._packs.folder / name)]
        # Read after that: puts that went to a sealed pack are finished, or never will be.
        scans = list(scan_all(store._packs))
        whole = finished(scans)
        self.batches: dict[int, set[str]] = defaultdict(set)  # dropped records, too, make a put whole
        for scan in scans:
            for _, record in scan.records:
                self.batches[record.batch].add(scan.pack)
        self.all = by_pack(whole)
        self.live = by_pack(self._indexed(whole))

    def run(self) -> None:
        over = self._evict()
        writers = Writers(self.store._packs, self.store.id)
        try:
            for pack in self._chosen(over):
                self._empty(pack, writers)
        finally:
            writers.close()
            self.store._packs.sweep()

    def _indexed(self, whole: list[tuple[str, int, Record]]) -> list[tuple[str, int, Record]]:
        """Without the records whose rows the index has in another place; those that it has nowhere are added."""
        at = {place[:3]: place[3:] for place in self.store._index.all()}
        packs = set(self.all)
        items = [
            (pack, slot, r)
            for pack, slot, r in whole
            if pack in self.sealed and at.get((r.key, r.start, r.rows), ("",))[0] not in packs
        ]
        if items:
            lost = [Place(r.key, r.start, r.rows, pack, slot) for pack, slot, r in items]
            self.store._index.insert(lost)
            at |= {place[:3]: place[3:] for place in self.store._index.find([p.key for p in lost])}
        return [item for item in whole if at.get((item[2].key, item[2].start, item[2].rows), item[:2]) == item[:2]]

    # -- eviction

    def _evict(self) -> bool:
        """Drop what the limits do not allow; whether the store was too large."""
        excess, pins = self._excess(), self.store.pins.keys()
        live = {pack: self.live[pack] for pack in self.sealed if self.live.get(pack)}
        victims = choose(self.store, live, self.policy, excess, self._kept(pins))
        # Nobody pins anything while this is held, and what was pinned since then stays.
        with self.store.pins.held() as now:
            if new := now - pins:
                victims = victims.without(self.store, self._kept(new))
            for digest in victims.arrays:
                self.store._arrays.remove(digest)
            for pack, items in victims.records.items():
                drop(self.store, pack, items)
        self.report.arrays += len(victims.arrays)
        for pack, items in victims.records.items():
            slots = {slot for slot, _ in items}
            self.live[pack] = [item for item in self.live[pack] if item[0] not in slots]
            self.report.evicted += len(items)
            layout = self.store._packs.get(pack).layout
            self.report.evicted_bytes += sum(layout.nbytes(record) for _, record in items)
        return excess > 0

    def _kept(self, pins: set[bytes]) -> set[bytes]:
        """Pinned keys, and those of runs that lend rows to pinned ones."""
        lenders: set[bytes] = set()
        places = [Place(r.key, r.start, r.rows, pack, slot) for pack, items in self.live.items() for slot, r in items]
        for place, _, run in runs_at(self.store._packs, places if pins else ()):
            if not pins.isdisjoint((run.key, place.key)):
                lenders |= self.store._index.lenders(run.blocks)
        return pins | lenders

    def _excess(self) -> int:
        """Bytes to evict, beside the space that nothing alive takes."""
        total = self.store.disk_bytes()
        if self.policy.max_bytes is None or total <= self.policy.max_bytes:
            return 0
        dead = sum(self._dead(pack) for pack in self.sealed)
        return max(0, total - dead - int(_LOW_WATER * self.policy.max_bytes)) or 1

    def _disk(self, pack: str) -> int:
        return (self.store._packs.folder / pack).stat().st_blocks * 512

    def _dead(self, pack: str) -> int:
        """Bytes that a copy of what lives in a pack would save."""
        live = self.live.get(pack)
        if not live:
            return self._disk(pack)
        return max(0, self._disk(pack) - disk_bytes(self.store, pack, live) - _SKELETON)

    # -- compaction

    def _chosen(self, over: bool) -> list[str]:
        """Sealed packs to be emptied: unused, with much that is dead, or small and many."""
        chosen = set()
        small: dict[str, list[str]] = defaultdict(list)
        for pack in self.sealed:
            dead = self._dead(pack)
            if dead and (not self.live.get(pack) or over or dead >= _DEAD_SHARE * self._disk(pack)):
                chosen.add(pack)
            elif self._disk(pack) < _SMALL_PACK:
                small[pack.rsplit("-", 1)[0]].append(pack)  # by dtype and width
        for group in small.values():
            if len(group) >= _SMALL_PACKS:
                chosen.update(group)
        return sorted(chosen)

    def _empty(self, pack: str, writers: Writers) -> None:
        """Copy what lives in a pack to another, and remove it."""
        began = time.monotonic()
        moved = copy_items(self.store, pack, self.live.get(pack, []), writers)
        self.store._index.move(moved.pairs)
        # Records of the same puts elsewhere must count without those that go now.
        for other, items in self.all.items():
            if other != pack:
                slots = [slot for slot, r in items if r.state != WHOLE and pack in self.batches[r.batch]]
                if slots:
                    self._mark_whole(other, slots)
        (self.store._packs.folder / pack).unlink(missing_ok=True)
        self.report.packs_removed += 1
        self.report.moved_bytes += moved.nbytes
        log.info("pack %s removed, %d bytes of it moved", pack, moved.nbytes)
        if self.bytes_per_s:
            time.sleep(max(0.0, moved.nbytes / self.bytes_per_s - (time.monotonic() - began)))

    def _mark_whole(self, pack: str, slots: list[int]) -> None:
        try:
            reader = self.store._packs.get(pack)
        except FileNotFoundError:
            return
        except CacheCorrupt as error:
            raise CacheError(f"pack {pack} cannot be read: {error}") from error
        records = reader.records(slots)
        still = [slot for slot, r in zip(slots, records, strict=True) if r is not None and r.live]
        reader.mark(still, WHOLE)
