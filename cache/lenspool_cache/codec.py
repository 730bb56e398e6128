"""Bytes on disk: element types, rows, and the fixed-size index record.

Everything is little-endian. bfloat16 has no predefined h5py type, so its HDF5 float type is built by hand here; it is
equal to HDF5's own `H5T_FLOAT_BFLOAT16LE`, and any HDF5 reader decodes it to the right numbers.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import ml_dtypes
import numpy as np
import xxhash
from h5py import h5t

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "float16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
    )
} | {"bfloat16": BFLOAT16}


def dtype_of(name: str) -> np.dtype:
    """Numpy dtype of a stored element type, e.g. `"bfloat16"`.

    Raises
    ------
    ValueError
        The store has no such type.
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"the store cannot hold dtype {name!r}; it holds {', '.join(sorted(_DTYPES))}") from None


def hdf5_type(name: str) -> h5t.TypeID:
    """HDF5 element type of a stored dtype; also the memory type for raw (unconverted) reads and writes."""
    if name != "bfloat16":
        return h5t.py_create(dtype_of(name))
    kind = h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)  # sign bit, exponent at 7 of 8 bits, mantissa at 0 of 7 bits
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def canonical_array(array: np.ndarray) -> np.ndarray:
    """The array in C order and little-endian, without a copy when it already is.

    Raises
    ------
    ValueError
        The store cannot hold its dtype.
    """
    return np.ascontiguousarray(array, dtype=dtype_of(array.dtype.name))


def raw(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8).data


def checksum(data: bytes | memoryview) -> int:
    """Unsigned 64-bit xxh3 of bytes."""
    return xxhash.xxh3_64_intdigest(data)


class Record(NamedTuple):
    """One entry of a pack's `/index`: where a segment's rows stand and what they are.

    Attributes
    ----------
    key
        32-byte entry key.
    batch
        Random number shared by all records of one put, over all packs.
    batch_size
        Number of records of that put; a put counts only when all of them are found.
    document_length, document_offset, document_checksum
        The run's key document in `/documents`.
    start, rows
        Absolute position of the first row, and number of rows.
    row_width
        Elements of a row that takes several rows of the pack; 0 where a row is one of the pack's.
    row
        First row in `/rows`.
    checksum
        xxh3_64 of the payload.
    name_offset, name_length
        The entry's name in `/documents`.
    time
        Nanoseconds since the epoch.
    state
        `LIVE`, `DROPPED`, or `WHOLE`: it counts by itself, since other records of its put were evicted. The only
        field that ever changes, so the record's checksum leaves it out.
    """

    key: bytes
    batch: int
    batch_size: int
    document_length: int
    start: int
    row_width: int
    row: int
    rows: int
    checksum: int
    document_offset: int
    document_checksum: int
    name_offset: int
    time: int
    name_length: int
    state: int = 0

    @property
    def live(self) -> bool:
        """Whether it was not dropped; a state that is none is damage, and not live."""
        return self.state in (LIVE, WHOLE)


# No flipped bit makes one of these another of them but LIVE a DROPPED, which is a miss.
LIVE, DROPPED, WHOLE = 0, 1, 0x3C

# 128 bytes: divides the page, so that no record straddles one.
_STRUCT = struct.Struct("<32sQIIII7QIIQ")
RECORD_SIZE = _STRUCT.size
STATE_OFFSET = 116
EMPTY_RECORD = bytes(RECORD_SIZE)

# The same layout as HDF5 and numpy see it.
RECORD_DTYPE = np.dtype(
    [
        ("key", "u1", (32,)),
        ("batch", "<u8"),
        ("batch_size", "<u4"),
        ("document_length", "<u4"),
        ("start", "<u4"),
        ("row_width", "<u4"),
        ("row", "<u8"),
        ("rows", "<u8"),
        ("checksum", "<u8"),
        ("document_offset", "<u8"),
        ("document_checksum", "<u8"),
        ("name_offset", "<u8"),
        ("time", "<u8"),
        ("name_length", "<u4"),
        ("state", "<u4"),
        ("record_checksum", "<u8"),
    ]
)


def pack_record(record: Record) -> bytes:
    """Record to its 128 bytes."""
    body = _STRUCT.pack(*record, 0)
    return body[:-8] + checksum(body[:STATE_OFFSET]).to_bytes(8, "little")


def unpack_record(data: bytes | memoryview) -> Record | None:
    """Record from its 128 bytes; None when the bytes do not match their checksum (torn, empty or flipped)."""
    *fields, expected = _STRUCT.unpack(data)
    if checksum(data[:STATE_OFFSET]) != expected:
        return None
    return Record(*fields)
