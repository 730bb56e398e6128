"""Upload: what a store has and its bucket has not, in packs made for it, then a shard that says what they hold.

A crash at any time leaves objects that no shard names: nobody sees them, and `sweep` deletes them a day later.
"""

from __future__ import annotations

import fcntl
import json
import logging
import secrets
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from lenspool_cache.codec import Record, pack_record
from lenspool_cache.compact import piece_of
from lenspool_cache.errors import CacheCorrupt
from lenspool_cache.identity import STORE_VERSION
from lenspool_cache.keys import Run
from lenspool_cache.locks import locked
from lenspool_cache.pack import Need, create_pack, is_sealed
from lenspool_cache.reader import PackReader
from lenspool_cache.remote import Remote
from lenspool_cache.scan import finished, scan_all
from lenspool_cache.shards import write_shard
from lenspool_cache.store import Store
from lenspool_cache.writing import Piece, need_of, stage

log = logging.getLogger(__name__)

PACK_BYTES = 256 << 20
_SHARD_PACKS = 8  # a shard follows after so many packs, so that a crash costs no more than those
_SMALL_SHARD, _SMALL_SHARDS = 4 << 20, 64  # so many that are so small are made one
GRACE_S = 86_400.0  # younger packs may be somebody's upload

Item = tuple[str, int, Record]


@dataclass(slots=True)
class Uploaded:
    """What an upload did; `busy`: another process of this store uploads at the moment, and nothing was done."""

    segments: int = 0
    nbytes: int = 0
    packs: int = 0
    arrays: int = 0
    busy: bool = False


def upload(store: Store, remote: Remote, done: set[str] | None = None) -> Uploaded:
    """Upload the entries and arrays of a store that a bucket does not have. Packs that are being written wait.

    Parameters
    ----------
    done
        Packs that earlier calls have uploaded; those of this one are added. Without new ones their records are not
        read again.

    Raises
    ------
    CacheError
        The bucket cannot be reached, or refuses; what a shard names by then is there.
    """
    report = Uploaded()
    try:
        with store.errors(0), locked(store.path / "upload.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            remote.refresh()
            there = {place[:3] for place in remote.places()}
            if not there:
                document = {"version": STORE_VERSION, "id": store.id}
                remote.bucket.write("store.json", json.dumps(document).encode())
            sealed = {name for name in store._packs.names() if is_sealed(store._packs.folder / name)}
            items = [
                (pack, slot, record)
                for pack, slot, record in (finished(list(scan_all(store._packs))) if sealed - (done or set()) else ())
                if pack in sealed and (record.key, record.start, record.rows) not in there
            ]
            with tempfile.TemporaryDirectory(prefix="lenspool-upload-") as folder:
                readers: list[PackReader] = []
                for chunk in _chunks(store, items):
                    reader = _pack(store, chunk, Path(folder), report)
                    if reader is not None:
                        remote.bucket.upload(reader.path, f"packs/{reader.path.name}")
                        readers.append(reader)
                        report.packs += 1
                    if len(readers) == _SHARD_PACKS:
                        _finish(remote, readers, Path(folder))
                _finish(remote, readers, Path(folder))
                remote.refresh()
                _merge(remote, Path(folder))
            _arrays(store, remote, report)
            remote.refresh()
            if done is not None:
                done |= sealed
    except BlockingIOError:
        report.busy = True
    return report


def sweep(remote: Remote) -> int:
    """Delete packs that no shard names and that are older than a day; returns how many."""
    remote.refresh()
    known = {pack for shard in remote.shards() for pack, _ in remote.packs_of(shard)}
    there = remote.bucket.objects("packs")
    orphans = [name for name, found in there.items() if name not in known and found.age_s > GRACE_S]
    for name in orphans:
        remote.bucket.delete(f"packs/{name}")
    return len(orphans)


def _chunks(store: Store, items: Sequence[Item]) -> Iterator[list[Item]]:
    """Records for one pack each: of one dtype and width, not too many, those of a key document together."""
    kinds: dict[tuple[str, int], list[Item]] = defaultdict(list)
    for item in items:
        layout = store._packs.get(item[0], deleted=True).layout
        kinds[layout.dtype, layout.width].append(item)
    for group in kinds.values():
        chunk: list[Item] = []
        size = 0
        for item in sorted(group, key=_order):
            nbytes = store._packs.get(item[0], deleted=True).layout.nbytes(item[2])
            if chunk and size + nbytes > PACK_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(item)
            size += nbytes
        yield chunk


def _order(item: Item) -> tuple[str, int, int, int]:
    return item[0], item[2].document_offset, item[2].name_offset, item[2].start


def _pack(store: Store, chunk: Sequence[Item], folder: Path, report: Uploaded) -> PackReader | None:
    """A pack that holds these records and has no room for more; None when none of them can be read."""
    runs: list[tuple[Run, list[Piece], int]] = []
    for (pack, _), group in groupby(chunk, key=lambda item: (item[0], item[2].document_offset)):
        reader = store._packs.get(pack, deleted=True)
        pieces, record = [], None
        for _, _, record in group:
            try:
                pieces.append(piece_of(reader, record))
            except CacheCorrupt as error:
                log.warning("not uploaded: %s", error)
        document = reader.document(record) if record else None
        if pieces and document is not None and record is not None:
            runs.append((Run.stored(document), pieces, record.time))
    if not runs:
        return None
    needs = [need_of(run, pieces) for run, pieces, _ in runs]
    need = Need(*(sum(getattr(n, field) for n in needs) for field in ("rows", "records", "documents")))
    writer = create_pack(folder, store.id, *runs[0][1][0].kind, 0, need)
    try:
        for run, pieces, written in runs:
            records = stage(writer, run, pieces, secrets.randbits(64), len(pieces), written)
            writer.commit([pack_record(record) for record in records])
            report.segments += len(records)
            report.nbytes += sum(piece.array.nbytes for piece in pieces)
    finally:
        writer.close()
    return PackReader(writer.path, writer.layout)


def _finish(remote: Remote, readers: list[PackReader], folder: Path) -> None:
    if not readers:
        return
    add_shard(remote, {reader.path.name: reader for reader in readers}, folder)
    for reader in readers:
        reader.path.unlink()
    readers.clear()


def add_shard(remote: Remote, packs: Mapping[str, PackReader], folder: Path) -> None:
    """Upload a shard of packs that are there; `folder` is for its file."""
    name = f"{uuid.uuid4().hex}.h5"
    write_shard(folder / name, packs)
    remote.bucket.upload(folder / name, f"index/{name}")


def _merge(remote: Remote, folder: Path) -> None:
    """Make one shard of many small ones, which a machine that comes new would have to ask for one by one."""
    names = [name for name, size in remote.shards().items() if size < _SMALL_SHARD]
    if len(names) >= _SMALL_SHARDS:
        add_shard(remote, {pack: reader for name in names for pack, reader in remote.packs_of(name)}, folder)
        for name in names:
            remote.bucket.delete(f"index/{name}")


def _arrays(store: Store, remote: Remote, report: Uploaded) -> None:
    mine = store._arrays.digests()
    there = remote.bucket.objects("arrays") if mine else {}
    for digest in mine:
        path = store._arrays.path(digest)
        if path.name not in there:
            remote.bucket.upload(path, f"arrays/{path.name}")
            report.arrays += 1
