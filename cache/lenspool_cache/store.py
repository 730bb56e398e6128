"""The store: rows of activations by content key, shared by any number of processes on one machine.

store/
  store.json        what this is, and the store's identity
  packs/*.h5        the rows, and the records that say what they are: the truth
  arrays/*.h5       arrays by content hash
  pins/*, policy.json   what is kept
  index.sqlite      finds records; can be deleted at any time
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import RLock

import numpy as np

from lenspool_cache import ranges as rg
from lenspool_cache.arrays import ArrayFolder
from lenspool_cache.errors import CacheError, CacheFull
from lenspool_cache.follow import Follower
from lenspool_cache.identity import store_id
from lenspool_cache.index import Index, Place
from lenspool_cache.keeping import Keeper
from lenspool_cache.keys import Run
from lenspool_cache.layers import open_layers
from lenspool_cache.lending import blocks_at, blocks_of, own
from lenspool_cache.lookup import Lookup
from lenspool_cache.mounts import is_network
from lenspool_cache.pack import is_full
from lenspool_cache.pins import Pins
from lenspool_cache.policy import Policy
from lenspool_cache.reader import PackPool
from lenspool_cache.reading import Reading
from lenspool_cache.scan import finished, scan_all
from lenspool_cache.segment import Segment
from lenspool_cache.sizes import disk_bytes, payload_bytes
from lenspool_cache.usage import Usage
from lenspool_cache.writing import Piece, Writers, checked_rows, cut, spans

log = logging.getLogger(__name__)


class Store(Reading):
    """A content-hash store in a folder.

    Threads and processes may share it; a fork is noticed. Of equal rows put twice the first stay. Runs that begin alike
    lend each other rows (`find`), so that those of a shared prefix are stored once.

    Parameters
    ----------
    path
        Folder. Created, with a `store.json`, unless `read_only`.
    read_only
        Create and change nothing. Works without write permission.
    lower
        Folders or URLs (`s3://bucket/path`, extra `s3`) of stores that are only read: what one of them has is not
        stored again here. By default those that the store itself names (`save_lower`); of these, one that cannot be
        opened is left out, with a warning.
    network
        Several machines write to the folder, so each process has an index of its own; default: whether it is on a
        network file system.

    Raises
    ------
    CacheError
        The folder is not a store (read-only), is of another version, or cannot be made; so is a layer in `lower`.

    Attributes
    ----------
    path
        Folder of the store.
    id
        Identity of the store, given when it was made.
    pins
        Names under which runs and entries are kept whatever the policy says.
    network
        Whether several machines may write to the folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        read_only: bool = False,
        lower: Sequence[str | os.PathLike[str]] | None = None,
        network: bool | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self.read_only = read_only
        with self.errors(0):
            self.id = store_id(self.path, create=not read_only)
            packs = self.path / "packs"
            if not read_only:
                packs.mkdir(exist_ok=True)
        self._packs = PackPool(packs)
        self._arrays = ArrayFolder(self.path)
        self.network = is_network(self.path) if network is None else network
        follower = Follower(self._packs) if self.network else None
        self._index = Index(
            self.path, self.id, self._truth, partial(blocks_at, self._packs), read_only=read_only, follower=follower
        )
        self.pins = Pins(self.path)
        self._own = Lookup(self._packs, self._index)
        self._usage = Usage(self._index)
        self._writers = Writers(self._packs, self.id)
        self._write_lock = RLock()
        self._keeper = Keeper(self._writers, self._write_lock)
        self._closed = False
        self._layers = open_layers(self.path, lower)
        _stores.add(self)

    # -- writing

    def put(self, run: Run, entries: Mapping[str, Sequence[tuple[int, np.ndarray]]]) -> int:
        """Store rows of a run. All become visible together or not at all.

        Parameters
        ----------
        entries
            Name to pairs of start position and array [rows, width].

        Returns
        -------
        int
            Payload bytes written: rows that the store has already are not written again.

        Raises
        ------
        ValueError
            An array is not two-dimensional, has no width or a dtype that the store cannot hold, or a start is
            negative.
        CacheFull
            The disk has no room; nothing of the put is visible.
        CacheError
            The store is read-only or closed, or cannot be written to.
        """
        self.require_writable()
        checked = {
            name: [checked_rows(name, start, array) for start, array in parts] for name, parts in entries.items()
        }
        with self._write_lock:
            return self._write(run, cut(checked, self.missing(run, {n: spans(parts) for n, parts in checked.items()})))

    def _put_own(self, run: Run, entries: Mapping[str, Sequence[tuple[int, np.ndarray]]]) -> None:
        with self._write_lock:
            have = self._found(own(run, entries), None)
            left = {n: rg.subtract(spans(parts), [s.range for s in have.get(n, ())]) for n, parts in entries.items()}
            self._write(run, cut(entries, left))

    def _keep(self, run: Run, name: str, rows: Mapping[Segment, np.ndarray]) -> None:
        if self.read_only or self._closed:
            return
        try:
            self._put_own(run, {name: [(s.start, array[: s.range[1] - s.start]) for s, array in rows.items()]})
        except CacheError as error:
            log.warning("rows from a lower layer are not kept: %s", error)

    def _write(self, run: Run, pieces: Sequence[Piece]) -> int:
        needed = sum(piece.array.nbytes for piece in pieces)
        if pieces:
            with self.errors(needed):
                names = {run.entry(piece.name): piece.name for piece in pieces}
                places = self._writers.write(run, pieces)
                self._index.insert(places, list(blocks_of((place, names[place.key], run) for place in places)))
                self._keeper.note(needed)
        return needed

    def put_array(self, array: np.ndarray) -> str:
        """Store an array of any shape under its content; returns its digest, see `array_digest`.

        Raises
        ------
        ValueError
            The store cannot hold its dtype.
        CacheFull, CacheError
            As in `put`.
        """
        self.require_writable()
        with self.errors(array.nbytes):
            return self._arrays.put(array)

    def stats(self) -> dict[str, int | str]:
        """Numbers about the whole store; walks the index, so not for every request.

        `entries` counts segments, `payload_bytes` their rows, `corrupt` what this process found damaged.
        """
        places = self._index.all()
        return {
            "path": str(self.path),
            "id": self.id,
            "packs": len(self._packs.names()),
            "entries": len(places),
            "payload_bytes": payload_bytes(self._packs, places),
            "disk_bytes": self.disk_bytes(),
            "arrays": len(self._arrays.digests()),
            "corrupt": self._own.corrupt,
            "lower": ", ".join(layer.place for layer in self._layers),
        }

    def disk_bytes(self) -> int:
        """What packs and arrays take on the disk; they are sparse files."""
        return disk_bytes(self._packs, self._arrays)

    def close(self) -> None:
        """Flush and close all files. Reading opens them again; writing raises."""
        self._keeper.stop()
        with self._write_lock:
            self._closed = True
            try:
                with self.errors(0):
                    self._writers.sync()
                self._usage.flush()
            finally:
                self._writers.close()
                self._packs.close()
                self._index.close()
                for layer in self._layers:
                    layer.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- policy

    @property
    def policy(self) -> Policy:
        """Limits of the store, for all its processes; they are kept to by `collect`."""
        return Policy.load(self.path)

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.require_writable()
        with self.errors(0):
            policy.save(self.path)

    def require_writable(self) -> None:
        """Raise `CacheError` if the store is read-only or closed."""
        if self.read_only:
            raise CacheError(f"the store at {self.path} is open read-only")
        if self._closed:
            raise CacheError(f"the store at {self.path} is closed")

    @contextmanager
    def errors(self, needed: int) -> Iterator[None]:
        """Turn what the system and HDF5 raise into the store's errors."""
        try:
            yield
        except CacheFull as error:
            raise CacheFull(str(self.path), needed) from error
        except (OSError, RuntimeError) as error:
            if is_full(error):
                raise CacheFull(str(self.path), needed) from error
            raise CacheError(f"the store at {self.path} cannot be used: {error}") from error

    # -- inside

    def _truth(self) -> Iterator[Place]:
        for pack, slot, record in finished(list(scan_all(self._packs))):
            yield Place(record.key, record.start, record.rows, pack, slot)

    def _after_fork(self) -> None:
        # The packs and the database connection belong to the parent; a child begins its own.
        self._keeper.release()
        self._writers.close()
        self._write_lock = RLock()
        self._keeper = Keeper(self._writers, self._write_lock)
        self._own.after_fork()
        self._packs.after_fork()
        self._usage.after_fork()
        self._index.after_fork()
        for layer in self._layers:
            layer.after_fork()


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)
