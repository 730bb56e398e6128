"""Index shards: what stands in some uploaded packs but their rows, in one small HDF5 file.

A group for each pack, with copies of its `index` and `documents`, and attributes that say where in the pack its rows
are. So who has the shard finds and verifies records at home, and asks the object store for rows only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np

from lenspool_cache.codec import RECORD_DTYPE, RECORD_SIZE, dtype_of
from lenspool_cache.errors import CacheCorrupt
from lenspool_cache.reader import PackPool, PackReader
from lenspool_cache.segment import Layout

log = logging.getLogger(__name__)

FORMAT, FORMAT_VERSION = "lenspool-shard", 1
_ATTRIBUTES = ("dtype", "width", "rows_offset", "rows")


def write_shard(path: Path, packs: Mapping[str, PackReader]) -> None:
    """Write the shard of some packs, by name; what reads them may stand on a shard itself."""
    with h5py.File(path, "x", libver=("v110", "v110"), locking=False) as file:
        file.attrs.update({"format": FORMAT, "version": FORMAT_VERSION})
        for name, reader in packs.items():
            layout = reader.layout
            group = file.create_group(name)
            group.attrs.update({field: getattr(layout, field) for field in _ATTRIBUTES})
            group.create_dataset("index", data=np.frombuffer(reader.index(0, layout.records), RECORD_DTYPE))
            group.create_dataset("documents", data=np.frombuffer(reader.documents(), np.uint8))


def read_shard(path: Path) -> Iterator[tuple[str, Layout]]:
    """Names and layouts of the packs of a shard: rows at their offset in the pack, all else at that in the shard.

    Raises
    ------
    CacheCorrupt
        It is no shard, or damaged.
    """
    try:
        with h5py.File(path, "r", locking=False) as file:
            if file.attrs.get("format") != FORMAT or file.attrs.get("version") != FORMAT_VERSION:
                raise CacheCorrupt(path.name, f"not a {FORMAT} of version {FORMAT_VERSION}")
            for name, group in file.items():
                index, documents = group["index"], group["documents"]
                if index.dtype.itemsize != RECORD_SIZE or documents.dtype != np.uint8:
                    raise CacheCorrupt(path.name, "records or documents of another form")
                dtype, width, offset, rows = (group.attrs[field] for field in _ATTRIBUTES)
                dtype_of(str(dtype))
                yield (
                    name,
                    Layout(
                        str(dtype),
                        int(width),
                        int(offset),
                        int(rows),
                        index.id.get_offset(),
                        len(index),
                        documents.id.get_offset(),
                        len(documents),
                    ),
                )
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CacheCorrupt(path.name, f"not a readable shard: {error}") from error


class ShardReader(PackReader):
    """A pack whose records and documents stand in a shard; its rows are not read through this."""

    def mark(self, slots: Sequence[int], state: int) -> None:
        """Nothing: a shard is never changed; the index of this machine forgets what is damaged."""


class ShardPool(PackPool):
    """Packs by name, out of the shards of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.layouts: dict[str, tuple[Path, Layout]] = {}
        self._known: set[str] = set()

    def learn_all(self) -> None:
        """Look for shards that another thread or process copied here."""
        for path in sorted(self.folder.glob("[!.]*.h5")):
            if path.name not in self._known:
                try:
                    self.layouts |= {name: (path, layout) for name, layout in read_shard(path)}
                except CacheCorrupt as error:
                    log.warning("shard left out: %s", error)
                self._known.add(path.name)

    def relearn(self) -> None:
        """Forget the shards, some of which are gone, and look for them anew."""
        self.layouts, self._known = {}, set()
        self.learn_all()

    def _opened(self, name: str) -> PackReader:
        if name not in self.layouts:
            self.learn_all()
        elif not self.layouts[name][0].exists():
            self.relearn()
        if name not in self.layouts:
            raise FileNotFoundError(2, "no shard has this pack", name)
        return ShardReader(*self.layouts[name])
