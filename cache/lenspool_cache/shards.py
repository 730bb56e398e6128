"""Index shards: what stands in some uploaded packs but their rows, in one small HDF5 file.

A group for each pack, with the numbers of its `Layout` as attributes, and copies of its `index` and `documents`. So
who has the shard finds and verifies records at home, and asks the object store for rows only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from lenspool_cache.codec import RECORD_DTYPE, RECORD_SIZE
from lenspool_cache.errors import CacheCorrupt
from lenspool_cache.reader import PackReader
from lenspool_cache.segment import Layout

FORMAT, FORMAT_VERSION = "lenspool-shard", 1


def write_shard(path: Path, readers: Iterable[PackReader]) -> None:
    """Write the shard of some packs, which are named as their files are."""
    with h5py.File(path, "x", libver=("v110", "v110"), locking=False) as file:
        file.attrs.update({"format": FORMAT, "version": FORMAT_VERSION})
        for reader in readers:
            layout = reader.layout
            group = file.create_group(reader.path.name)
            group.attrs.update(asdict(layout))
            records = np.frombuffer(reader.index(0, layout.records), RECORD_DTYPE)
            group.create_dataset("index", data=records)
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
                layout = Layout(**{key: _plain(value) for key, value in group.attrs.items()})
                if index.shape != (layout.records,) or index.dtype.itemsize != RECORD_SIZE:
                    raise CacheCorrupt(path.name, "an index of another size")
                yield (
                    name,
                    replace(layout, index_offset=index.id.get_offset(), documents_offset=documents.id.get_offset()),
                )
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CacheCorrupt(path.name, f"not a readable shard: {error}") from error


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, np.integer) else value
