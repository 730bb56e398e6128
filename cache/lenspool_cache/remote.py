"""A store in a bucket, as a layer under another store. Whoever knows its URL finds what was uploaded, from anywhere.

bucket/
  store.json        what this is
  index/*.h5        shards: the records and key documents of the packs
  packs/*.h5        packs as `upload` makes them: exactly as large as what they hold, never changed
  arrays/*.h5       arrays by content hash

Shards are copied to a folder of this machine and found through an index there, so a lookup asks the network for
nothing but new shards, now and then and in the background. Rows are asked for by range, neighbours in one request.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Lock, Thread

import numpy as np

from lenspool_cache import arrays
from lenspool_cache.bucket import Bucket
from lenspool_cache.codec import checksum, dtype_of, raw
from lenspool_cache.errors import CacheCorrupt, CacheError
from lenspool_cache.identity import STORE_VERSION
from lenspool_cache.index import Index, Place
from lenspool_cache.keys import array_digest
from lenspool_cache.lending import Sources, blocks_at
from lenspool_cache.lookup import Lookup
from lenspool_cache.mounts import is_network
from lenspool_cache.ranges import Range
from lenspool_cache.reader import PackReader
from lenspool_cache.scan import scan_pack
from lenspool_cache.segment import Segment
from lenspool_cache.shards import ShardPool, ShardReader, read_shard

log = logging.getLogger(__name__)

_REFRESH_S = 10.0  # how old what is known of the bucket may grow before it is looked at again
_REQUEST_BYTES = 64 << 20  # most bytes of rows in one request


def mirror_folder(url: str) -> Path:
    """Where this machine keeps the shards of a bucket.

    Raises
    ------
    CacheError
        The user's folder is on a network, and that in the temporary one is another user's.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if is_network(home):  # where SQLite's log cannot be, and others copy shards, too
        home = Path(tempfile.gettempdir()) / f"lenspool-{os.getuid()}"
        home.mkdir(mode=0o700, exist_ok=True)
        if home.stat().st_uid != os.getuid():
            raise CacheError(f"{home} belongs to somebody else: set XDG_CACHE_HOME to a folder of this machine")
    return home / "lenspool" / "remote" / hashlib.sha256(url.encode()).hexdigest()[:32]


class Remote:
    """The store under a URL.

    Attributes
    ----------
    bucket
        Its objects.
    """

    far = True

    def __init__(self, url: str) -> None:
        self.bucket = Bucket(url)
        self.place = self.bucket.url
        folder = mirror_folder(self.place)
        try:
            (folder / "shards").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CacheError(f"{folder} cannot be used for what is known of {url}: {error}") from error
        self._packs = ShardPool(folder / "shards")
        self._index = Index(folder, self.place, self._truth, partial(blocks_at, self._packs))
        self._own = Lookup(self._packs, self._index)
        self.identity = self._own.identity
        self._lock = Lock()
        self._refreshed = -float("inf")
        self._refreshing: Thread | None = None

    # -- what is there

    def refresh(self) -> None:
        """Copy the shards that are new.

        Raises
        ------
        CacheError
            The bucket cannot be reached, or is a store of another version.
        """
        with self._lock:
            try:
                self._copy_shards()
            finally:
                self._refreshed = time.monotonic()

    def shards(self) -> dict[str, int]:
        """Names and bytes of the shards that the bucket has and that are copied here."""
        there = self.bucket.objects("index")
        return {path.name: path.stat().st_size for path in self._packs.folder.glob("[!.]*.h5") if path.name in there}

    def packs_of(self, shard: str) -> Iterator[tuple[str, PackReader]]:
        """The packs that a shard names, as far as it has them."""
        path = self._packs.folder / shard
        for name, layout in read_shard(path):
            yield name, ShardReader(path, layout)

    def _copy_shards(self) -> None:
        folder = self._packs.folder
        there = self.bucket.objects("index")
        new = [name for name in there if not (folder / f"{name}.indexed").exists()]
        if new and (version := json.loads(self.bucket.read("store.json"))["version"]) != STORE_VERSION:
            raise CacheError(f"the store at {self.place} has version {version}; this lenspool reads {STORE_VERSION}")
        for name in new:
            path, temporary = folder / name, folder / f".{name}.{uuid.uuid4().hex}.tmp"
            try:
                temporary.write_bytes(self.bucket.read(f"index/{name}"))
                temporary.rename(path)
                self._index.insert(list(self._places(path)))
            except (FileNotFoundError, CacheCorrupt) as error:
                log.warning("shard %s of %s left out: %s", name, self.place, error)
                path.unlink(missing_ok=True)
                continue
            except OSError as error:
                raise CacheError(f"{folder} cannot be written to: {error}") from error
            (folder / f"{name}.indexed").touch()
        if gone := [path for path in folder.glob("[!.]*.h5") if path.name not in there]:
            self._forget(gone)

    def _forget(self, shards: Sequence[Path]) -> None:
        """Shards that were joined, or made anew without packs that were deleted."""
        for path in shards:
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.indexed").unlink(missing_ok=True)
        self._packs.relearn()
        self._index.drop([place for place in self._index.all() if place.pack not in self._packs.layouts])
        self._index.insert(list(self._truth()))  # the same rows may be in another pack

    def _places(self, shard: Path) -> Iterator[Place]:
        for name, reader in self.packs_of(shard.name):
            for slot, record in scan_pack(name, reader).records:
                if record.live:
                    yield Place(record.key, record.start, record.rows, name, slot)

    def _truth(self) -> Iterator[Place]:
        for path in sorted(self._packs.folder.glob("[!.]*.h5")):
            try:
                yield from self._places(path)
            except (CacheCorrupt, OSError) as error:
                log.warning("shard %s left out: %s", path.name, error)

    def _look(self) -> None:
        """Refresh when it is time: at the first lookup here, later in the background."""
        if time.monotonic() - self._refreshed < _REFRESH_S or (self._refreshing and self._refreshing.is_alive()):
            return
        if self._refreshed == -float("inf"):
            self._refresh_quietly()
            return
        self._refreshing = Thread(target=self._refresh_quietly, name="lenspool-remote", daemon=True)
        self._refreshing.start()

    def _refresh_quietly(self) -> None:
        try:
            self.refresh()
        except CacheError as error:
            log.warning("what is new in %s stays unknown: %s", self.place, error)

    # -- a layer

    def find(self, sources: Sources, within: Range | None) -> list[Segment]:
        """As `Lookup.find`."""
        self._look()
        return self._own.find(sources, within)

    def lenders(self, blocks: Sequence[bytes]) -> set[bytes]:
        """As `Index.lenders`."""
        self._look()
        return self._own.lenders(blocks)

    def places(self) -> list[Place]:
        """Where every segment stands."""
        return self._index.all()

    def read(self, segments: Sequence[Segment]) -> list[np.ndarray]:
        """Rows of segments; what stands side by side comes in one request.

        Raises
        ------
        CacheCorrupt
            As in `Lookup.read_into`.
        CacheError
            The bucket cannot be reached.
        """
        found: dict[Segment, np.ndarray] = {}
        for group in self._neighbours(segments):
            first, last = group[0], group[-1]
            layout = self._packs.get(first.pack).layout
            start = layout.rows_offset + first.row * layout.row_bytes
            stop = layout.rows_offset + last.row * layout.row_bytes + last.nbytes
            try:
                data = self.bucket.read(f"packs/{first.pack}", start, stop)
            except FileNotFoundError as error:
                self._own.lost(first, str(error), error)
            for segment in group:
                at = (segment.row - first.row) * layout.row_bytes
                part = memoryview(data)[at : at + segment.nbytes]
                if len(part) != segment.nbytes or checksum(part) != segment.checksum:
                    self._own.lost(segment, "the rows do not match their checksum", None)
                rows = np.frombuffer(part, dtype_of(segment.dtype))
                found[segment] = rows.reshape(segment.rows, segment.width)
        return [found[segment] for segment in segments]

    def _neighbours(self, segments: Sequence[Segment]) -> Iterator[list[Segment]]:
        group: list[Segment] = []
        stop = 0
        for segment in sorted(set(segments), key=lambda s: (s.pack, s.row)):
            last = group[-1] if group else None
            fits = sum(s.nbytes for s in group) + segment.nbytes <= _REQUEST_BYTES
            if last and not (last.pack == segment.pack and segment.row == stop and fits):
                yield group
                group = []
            group.append(segment)
            stop = segment.row + segment.nbytes // self._packs.get(segment.pack).layout.row_bytes
        if group:
            yield group

    def read_into(self, segment: Segment, out: np.ndarray) -> None:
        """As `Lookup.read_into`."""
        raw(out)[:] = raw(self.read([segment])[0])

    def has_array(self, digest: str) -> bool:
        """Whether an array is there."""
        try:
            return bool(self.bucket.read(arrays.object_name(digest), 0, 1))
        except (KeyError, FileNotFoundError, CacheError):
            return False

    def get_array(self, digest: str) -> np.ndarray:
        """As `Store.get_array`."""
        try:
            array = arrays.from_bytes(self.bucket.read(arrays.object_name(digest)))
        except FileNotFoundError:
            raise KeyError(digest) from None
        if array_digest(array) != digest:
            raise CacheCorrupt(digest, "content does not match the digest")
        return array

    def close(self) -> None:
        """Close all files."""
        if self._refreshing is not None:
            self._refreshing.join()
        self._packs.close()
        self._index.close()

    def after_fork(self) -> None:
        """In a forked child: leave the parent's connections alone."""
        self._lock = Lock()
        self._refreshing = None
        self.bucket.after_fork()
        self._packs.after_fork()
        self._own.after_fork()
        self._index.after_fork()
