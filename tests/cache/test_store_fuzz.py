"""Random damage to the packs, a thousand times: every one is found by `verify`, and no answer is ever wrong."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from store_samples import a_run, flip, pack_files, rows_of, same_bits

from lenspool_cache import CacheCorrupt, Policy, Store, verify
from lenspool_cache.codec import RECORD_SIZE
from lenspool_cache.segment import Layout

RUNS, FLIPS, CUTS = 3, 700, 300
DOCUMENT = len(a_run(0).data) + 1  # with the name behind it


@pytest.fixture
def filled(folder: Path) -> Path:
    with Store(folder) as store:
        store.policy = Policy(max_bytes=1)  # the smallest packs
        for number in range(RUNS):
            store.put(a_run(number), {"h": [(0, rows_of(number))], "g": [(0, rows_of(number, dtype="bfloat16"))]})
    return folder


def answers(store: Store) -> int:
    """How many entries are answered, each of them right."""
    right = 0
    for number in range(RUNS):
        for name, dtype in (("h", "float32"), ("g", "bfloat16")):
            try:
                rows = store.rows(a_run(number), name, [(0, 16)])
            except (KeyError, CacheCorrupt):
                continue
            assert same_bits(rows, rows_of(number, dtype=dtype))
            right += 1
    return right


def used(path: Path) -> list[range]:
    """Byte ranges of a pack that hold rows, records and documents."""
    layout = Layout.read(path)
    documents = RUNS * DOCUMENT
    return [
        range(layout.rows_offset, layout.rows_offset + RUNS * 16 * layout.row_bytes),
        range(layout.index_offset, layout.index_offset + RUNS * RECORD_SIZE),
        range(layout.documents_offset, layout.documents_offset + documents),
    ]


def is_name(path: Path, offset: int) -> bool:
    at = offset - Layout.read(path).documents_offset
    return 0 <= at < RUNS * DOCUMENT and at % DOCUMENT == DOCUMENT - 1


def damage(store: Store) -> bool:
    report = verify(store)
    return not report.ok or report.dropped > 0 or report.unfinished > 0


def test_random_bit_flips(filled: Path) -> None:
    rng = random.Random(11)
    for _ in range(FLIPS):
        path = rng.choice(pack_files(filled))
        offset = rng.choice(rng.choice(used(path)))
        flip(path, offset)
        with Store(filled, read_only=True) as store:
            assert damage(store), f"{path.name}: a flipped bit at {offset} is not found"
            # Nothing is looked up by the name that stands there: its hash is in the key.
            assert answers(store) == 2 * RUNS - (not is_name(path, offset))
        flip(path, offset)
    with Store(filled, read_only=True) as store:
        assert not damage(store)
        assert answers(store) == 2 * RUNS


def test_random_truncations(filled: Path) -> None:
    rng = random.Random(12)
    for _ in range(CUTS):
        path = rng.choice(pack_files(filled))
        whole = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(rng.randrange(len(whole)))
        with Store(filled, read_only=True) as store:
            assert damage(store)
            assert answers(store) == RUNS, "the other pack still answers"
        path.write_bytes(whole)
    with Store(filled, read_only=True) as store:
        assert not damage(store)
        assert answers(store) == 2 * RUNS
        assert isinstance(store.rows(a_run(0), "h", [(0, 1)]), np.ndarray)
