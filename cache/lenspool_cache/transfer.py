"""Take entries from one store to another in a plain HDF5 file: a group for each run, a dataset for each segment."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5s

from lenspool_cache.catalog import Entry
from lenspool_cache.codec import checksum, dtype_of, hdf5_type, raw
from lenspool_cache.errors import CacheCorrupt
from lenspool_cache.keys import Run
from lenspool_cache.store import Store

FORMAT, FORMAT_VERSION = "lenspool-export", 1


def export(store: Store, entries: Iterable[Entry], path: Path) -> int:
    """Write entries to a new file; returns how many. Attributes of each dataset say name, start and dtype.

    Raises
    ------
    FileExistsError
        There is such a file.
    CacheCorrupt
        Rows do not match their checksum.
    """
    count = 0
    with h5py.File(path, "x", locking=False) as file:
        file.attrs.update({"format": FORMAT, "version": FORMAT_VERSION})
        for entry in entries:
            count += 1
            group = file.require_group(entry.run.key.hex())
            if "document" not in group:
                group["document"] = np.frombuffer(entry.run.data, np.uint8)
            rows = store.read(entry.segment)
            kind = hdf5_type(rows.dtype.name)
            name = str(len(group))
            dataset = h5d.create(group.id, name.encode(), kind, h5s.create_simple(rows.shape))
            dataset.write(h5s.ALL, h5s.ALL, rows, mtype=kind)
            group[name].attrs.update(
                {
                    "name": entry.name,
                    "start": entry.segment.start,
                    "dtype": rows.dtype.name,
                    "xxh3_64": np.uint64(checksum(raw(rows))),
                }
            )
    return count


def import_file(store: Store, path: Path) -> int:
    """Put what `export` wrote; returns the payload bytes that the store did not have.

    Raises
    ------
    CacheCorrupt
        The file is not an export, or is damaged; runs before the damaged one are stored.
    """
    written = 0
    try:
        with h5py.File(path, "r", locking=False) as file:
            if file.attrs.get("format") != FORMAT or file.attrs.get("version") != FORMAT_VERSION:
                raise CacheCorrupt(path.name, f"not a {FORMAT} of version {FORMAT_VERSION}")
            for key, group in file.items():
                run = Run(json.loads(group["document"][:].tobytes()))
                if run.key.hex() != key:
                    raise CacheCorrupt(key, "the key is not that of the document")
                for number in sorted(group.keys() - {"document"}):
                    dataset = group[number]
                    attrs = dataset.attrs
                    rows = np.empty(dataset.shape, dtype_of(attrs["dtype"]))
                    dataset.id.read(h5s.ALL, h5s.ALL, rows, mtype=hdf5_type(attrs["dtype"]))
                    if checksum(raw(rows)) != int(attrs["xxh3_64"]):
                        raise CacheCorrupt(key, f"the rows of {attrs['name']} do not match their checksum")
                    written += store.put(run, {str(attrs["name"]): [(int(attrs["start"]), rows)]})
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise CacheCorrupt(path.name, f"cannot be read: {error}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise CacheCorrupt(path.name, f"cannot be read: {error}") from error
    return written
