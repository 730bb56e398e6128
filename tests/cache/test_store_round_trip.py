"""What is put comes back bit for bit, in the dtype in which it was put, also through foreign HDF5 readers."""

from __future__ import annotations

from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from store_samples import a_run, pack_files, rows_of, same_bits
from test_prefix import PATTERN

from lenspool_cache import CacheError, Store, collect, evict, verify
from lenspool_cache.codec import RECORD_DTYPE, Record, pack_record, unpack_record

DTYPES = [
    "bfloat16",
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
]


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def every_bit_pattern(name: str) -> np.ndarray:
    """Random bytes as numbers: among them NaNs with payloads, infinities, denormals, -0."""
    dtype = numpy_dtype(name)
    if dtype.itemsize == 2:
        return np.arange(2**16, dtype=np.uint16).view(dtype).reshape(256, 256)
    return np.frombuffer(np.random.default_rng(0).bytes(64 * 256 * dtype.itemsize), dtype).reshape(64, 256)


@pytest.mark.parametrize("name", DTYPES)
def test_bits(folder: Path, name: str) -> None:
    array = every_bit_pattern(name)
    with Store(folder) as store:
        assert store.put(a_run(), {"h": [(7, array)]}) == array.nbytes
    with Store(folder, read_only=True) as store:
        (segment,) = store.lookup(a_run(), ["h"])["h"]
        assert (segment.range, segment.dtype, segment.width) == ((7, 7 + len(array)), name, 256)
        assert same_bits(store.read(segment), array)
        assert same_bits(store.rows(a_run(), "h", [segment.range]), array)


@pytest.mark.parametrize("special", [np.nan, -np.nan, np.inf, -np.inf, -0.0])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_special_values(store: Store, name: str, special: float) -> None:
    array = np.full((3, 5), special).astype(numpy_dtype(name))
    store.put(a_run(), {"h": [(0, array)]})
    assert same_bits(store.rows(a_run(), "h", [(0, 3)]), array)


def test_bfloat16_is_right_for_plain_h5py(store: Store, folder: Path) -> None:
    array = every_bit_pattern("bfloat16")
    store.put(a_run(), {"h": [(0, array)]})
    (path,) = pack_files(folder)
    with h5py.File(path) as file:  # while the writer has it open, with h5py's own locking
        values = file["rows"][: len(array)]
        assert dict(file.attrs)["dtype"] == file["rows"].attrs["dtype"] == "bfloat16"
        assert file.attrs["store"] == store.id
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, array.astype(np.float32))


def test_index_and_documents_are_readable_by_h5py(store: Store, folder: Path) -> None:
    store.put(a_run(), {"blocks.0.hook_resid_post": [(5, rows_of(1))]})
    (path,) = pack_files(folder)
    with h5py.File(path) as file:
        record = file["index"][0]
        documents = file["documents"][:4096].tobytes()
    assert record["key"].tobytes() == a_run().entry("blocks.0.hook_resid_post")
    assert (record["start"], record["rows"], record["row"]) == (5, 16, 0)
    at = int(record["document_offset"])
    assert documents[at : at + int(record["document_length"])] == a_run().data
    at = int(record["name_offset"])
    assert documents[at : at + int(record["name_length"])] == b"blocks.0.hook_resid_post"


def test_record_bytes_agree_with_the_hdf5_type() -> None:
    record = Record(bytes(range(32)), *range(100, 114))
    data = pack_record(record)
    assert unpack_record(data) == record
    seen = np.frombuffer(data, RECORD_DTYPE)[0]
    assert RECORD_DTYPE.names is not None
    assert RECORD_DTYPE.names[:-1] == Record._fields
    assert [seen["key"].tobytes(), *(int(seen[name]) for name in Record._fields[1:])] == list(record)


def test_rows_as_wide_as_their_run_share_packs(folder: Path) -> None:
    """Prompts of all lengths do not make a file for each; what is left after eviction and compaction is whole."""
    lengths = range(1, 150)

    def pattern(length: int) -> np.ndarray:
        return rows_of(length, length, 4 * length, "bfloat16")

    with Store(folder) as store:
        for length in lengths:
            store.put(a_run(length), {PATTERN: [(0, pattern(length))], "h": [(0, rows_of(length))]})
        assert len(pack_files(folder)) == 2
        payload = sum(8 * length**2 for length in lengths) + len(lengths) * rows_of(0).nbytes
        assert store.stats()["payload_bytes"] == payload
    with Store(folder) as store:
        assert verify(store).ok and verify(store).payload_bytes == payload
        assert evict(store, [a_run(length).key for length in lengths if length % 3]) == 2 * 100
        done = collect(store)
        assert done.packs_removed == 2 == len(pack_files(folder))
        for length in lengths:
            if length % 3:
                assert store.lookup(a_run(length), [PATTERN]) == {}
                continue
            assert same_bits(store.rows(a_run(length), PATTERN, [(0, length)]), pattern(length))
            assert same_bits(store.rows(a_run(length), PATTERN, [(1, 2)]), pattern(length)[1:2])
            assert store.lookup(a_run(length), [PATTERN])[PATTERN][0].width == 4 * length
        report = verify(store)
        assert (report.damaged, report.stale, report.unindexed) == ([], 0, 0)


def test_wide_rows(store: Store) -> None:
    logits = rows_of(3, rows=40, width=151_936)
    store.put(a_run(), {"unembed.hook_out": [(0, logits)]})
    segments = store.lookup(a_run(), ["unembed.hook_out"])["unembed.hook_out"]
    assert len(segments) > 1, "one row of logits must not cost a read of all of them"
    assert same_bits(store.rows(a_run(), "unembed.hook_out", [(0, 40)]), logits)
    assert same_bits(store.rows(a_run(), "unembed.hook_out", [(3, 4), (11, 30)]), logits[[3, *range(11, 30)]])


def test_a_put_larger_than_a_pack(store: Store) -> None:
    array = np.arange(20 << 20, dtype=np.uint8).reshape(-1, 1024)
    store.put(a_run(), {"h": [(0, array)]})
    assert same_bits(store.rows(a_run(), "h", [(0, len(array))]), array)


def test_blob_of_width_one(store: Store) -> None:
    text = '{"token_ids":[1,2],"text":"hé","finish_reason":"stop"}'.encode()
    store.put(a_run(), {"generation": [(0, np.frombuffer(text, np.uint8)[:, None])]})
    assert store.rows(a_run(), "generation", [(0, len(text))]).tobytes() == text


@pytest.mark.parametrize("layout", ["fortran", "strided", "big-endian"])
def test_any_memory_layout(store: Store, layout: str) -> None:
    array = rows_of(4, 20, 30)
    given = {
        "fortran": np.asfortranarray(array),
        "strided": np.repeat(array, 2, axis=1)[:, ::2],
        "big-endian": array.astype(">f4"),
    }[layout]
    store.put(a_run(), {"h": [(0, given)]})
    assert same_bits(store.rows(a_run(), "h", [(0, 20)]), array)


@pytest.mark.parametrize(
    ("start", "array"),
    [
        (0, np.zeros(4, np.float32)),
        (0, np.zeros((2, 0), np.float32)),
        (-1, np.zeros((2, 2), np.float32)),
        (0, np.zeros((2, 2), bool)),
        (0, np.zeros((2, 2), complex)),
    ],
)
def test_refused_rows(store: Store, start: int, array: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"rows of h|cannot hold"):
        store.put(a_run(), {"good": [(0, rows_of(0))], "h": [(start, array)]})
    assert store.lookup(a_run(), ["good", "h"]) == {}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (0, 4)])
def test_arrays(store: Store, name: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(numpy_dtype(name))
    digest = store.put_array(array)
    assert store.put_array(array.copy()) == digest
    assert store.has_array(digest)
    assert same_bits(store.get_array(digest), array)


def test_unknown_arrays(store: Store) -> None:
    for digest in ("0" * 64, "../store", "", "A" * 64):
        assert not store.has_array(digest)
        with pytest.raises(KeyError):
            store.get_array(digest)


def test_read_only_and_closed_stores_refuse_to_write(folder: Path) -> None:
    with Store(folder) as store:
        pass
    for refusing, reason in ((store, "closed"), (Store(folder, read_only=True), "read-only")):
        with pytest.raises(CacheError, match=reason):
            refusing.put(a_run(), {"h": [(0, rows_of(0))]})
        with pytest.raises(CacheError, match=reason):
            refusing.put_array(rows_of(0))
