"""docs/format.md holds: a reader that has only h5py and numpy reads what we write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from store_samples import a_run, rows_of
from test_prefix import LONG, PATTERN, H, put, run_of, truth

from lenspool_cache import Policy, Store, collect, evict
from lenspool_cache import ranges as rg
from lenspool_cache.codec import DROPPED, LIVE, RECORD_DTYPE, WHOLE

ROOT = Path(__file__).parents[2]
READER = ROOT / "examples" / "read_store.py"


def read(folder: Path, name: str, number: int) -> list[tuple[dict, int, np.ndarray]]:
    command = [sys.executable, "-I", str(READER), str(folder), name, a_run(number).key.hex()]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    return [(d["document"], d["start"], np.array(d["rows"], np.float64)) for d in found]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int32"])
def test_a_stranger_reads_the_store(folder: Path, dtype: str) -> None:
    with Store(folder) as store:
        for number in range(3):
            store.put(a_run(number), {"h": [(5, rows_of(number, dtype=dtype))], "g": [(0, rows_of(9))]})
        ((document, start, values),) = read(folder, "h", 1)  # while its writer has the packs open
        assert document == a_run(1).document
        assert start == 5
        np.testing.assert_array_equal(values, rows_of(1, dtype=dtype).astype(np.float64))


def test_a_stranger_reads_rows_as_wide_as_their_run(folder: Path) -> None:
    with Store(folder) as store:
        for length in (3, 7, 5):
            store.put(a_run(length), {PATTERN: [(1, rows_of(length, length, 4 * length, "bfloat16"))]})
        for length in (7, 5):
            ((_, start, values),) = read(folder, PATTERN, length)
            assert start == 1
            np.testing.assert_array_equal(values, rows_of(length, length, 4 * length, "bfloat16").astype(np.float64))


def test_a_stranger_sees_no_more_than_we_do(folder: Path) -> None:
    """After eviction and compaction: what is gone is gone, and what remains of a put still counts."""
    with Store(folder) as store:
        for number in range(3):
            store.put(a_run(number), {"h": [(0, rows_of(number, dtype="bfloat16"))], "g": [(0, rows_of(9))]})
    with Store(folder) as store:
        evict(store, [a_run(n).entry("h") for n in (0, 1, 2)] + [a_run(0).key])
        assert read(folder, "g", 0) == []
        collect(store, Policy())
        assert [len(read(folder, "g", n)) for n in range(3)] == [0, 1, 1]
        assert [len(read(folder, "h", n)) for n in range(3)] == [0, 0, 0]


def test_a_stranger_finds_the_rows_of_a_shared_prefix(folder: Path) -> None:
    """To the token and the edit, also of a run that has no record of its own; and nothing else."""
    edit = {"hook": "h", "op": "add", "value": {"array": "a"}, "ranges": [[30, 50]]}
    lender, edited = run_of(LONG), run_of(LONG, [edit])
    takers = [edited, run_of([*LONG[:45], 1, 2]), run_of(LONG[:20]), run_of(LONG, [{**edit, "ranges": [[30, None]]}])]
    with Store(folder) as store:
        for run in (lender, *takers):
            there = store.missing(run, {H: [(0, len(run.document["tokens"]))]}) or {H: []}
            for start, stop in there[H] if run is not takers[3] else ():
                put(store, run, H, start, stop)
        for run in takers:
            length = len(run.document["tokens"])
            command = [sys.executable, "-I", str(READER), str(folder), H, run.data.decode()]
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
            got = {
                p: row
                for line in map(json.loads, lines)
                for p, row in zip(line["positions"], line["rows"], strict=True)
            }
            there = rg.subtract([(0, length)], store.missing(run, {H: [(0, length)]}).get(H, []))
            assert sorted(got) == rg.positions(there)
            assert len(got) == (length if run is not takers[3] else 50)
            np.testing.assert_array_equal([got[p] for p in sorted(got)], truth(run, H, 0, len(got)))


def test_the_document_names_every_field_and_state() -> None:
    text = (ROOT / "docs" / "format.md").read_text()
    assert RECORD_DTYPE.names is not None
    assert [name for name in RECORD_DTYPE.names if f"`{name}`" not in text] == []
    assert f"{LIVE}: live; {DROPPED}: dropped; {WHOLE:#04X}: live".replace("0X", "0x") in text


def test_the_reader_is_short_and_uses_nothing_of_ours() -> None:
    source = READER.read_text()
    assert "import lenspool" not in source
    assert "from lenspool" not in source
    assert len([line for line in source.splitlines() if line.strip()]) <= 80
