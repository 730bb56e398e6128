"""Rows as the bytes of a small HDF5 file, for a reader that cannot reach the store."""

from __future__ import annotations

import io
from collections.abc import Mapping

import h5py
import numpy as np
from h5py import h5d, h5s

from lenspool_cache.codec import canonical_array, checksum, dtype_of, hdf5_type, raw
from lenspool_cache.errors import CacheCorrupt


def to_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """HDF5 file, as bytes, with one checksummed dataset per array under the array's name."""
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        for name, array in arrays.items():
            array = canonical_array(array)
            kind = hdf5_type(array.dtype.name)
            dataset = h5d.create(file.id, name.encode(), kind, h5s.create_simple(array.shape))
            if array.size:
                dataset.write(h5s.ALL, h5s.ALL, array, mtype=kind)
            file[name].attrs.update({"dtype": array.dtype.name, "xxh3_64": np.uint64(checksum(raw(array)))})
    return stream.getvalue()


def from_bytes(data: bytes) -> dict[str, np.ndarray]:
    """Arrays of `to_bytes`, bit for bit.

    Raises
    ------
    CacheCorrupt
        The bytes are damaged.
    """
    out: dict[str, np.ndarray] = {}
    try:
        with h5py.File(io.BytesIO(data), "r") as file:
            for name, dataset in file.items():
                kind = str(dataset.attrs["dtype"])
                array = np.empty(dataset.shape, dtype_of(kind))
                if array.size:
                    dataset.id.read(h5s.ALL, h5s.ALL, array, mtype=hdf5_type(kind))
                if checksum(raw(array)) != int(dataset.attrs["xxh3_64"]):
                    raise CacheCorrupt(name, "does not match its checksum")
                out[name] = array
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise CacheCorrupt("inline", str(error)) from error
    return out
