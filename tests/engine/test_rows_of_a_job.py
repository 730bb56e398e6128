"""Rows are put together by absolute position, whatever the steps were in which they came."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lenspool_worker.capture import JobRows, gather, to_numpy

HOOK = "blocks.0.hook_resid_post"
VALUES = torch.arange(40.0)[:, None] * torch.tensor([1.0, 100.0])


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(1, 20)), max_size=12), st.integers(0, 19), st.integers(1, 20))
def test_the_latest_rows_of_each_position_stand(chunks: list[tuple[int, int]], start: int, count: int) -> None:
    """As a naive list of rows, one per position, over which each chunk is written."""
    naive: dict[int, np.ndarray] = {}
    rows = JobRows("tag")
    for number, (position, length) in enumerate(chunks):
        chunk = VALUES[position : position + length] + number / 8
        rows.add(HOOK, position, chunk)
        naive |= {position + i: row for i, row in enumerate(chunk.numpy())}
    assert rows.fired() == ({HOOK: sum(n for _, n in chunks)} if chunks else {})
    wanted = range(start, start + count)
    if all(p in naive for p in wanted):
        ((at, got),) = rows.assemble(HOOK, [(start, start + count)])
        assert at == start
        assert np.array_equal(got, np.stack([naive[p] for p in wanted]))
    else:
        hole = next(p for p in wanted if p not in naive)
        with pytest.raises(LookupError, match=rf"{HOOK} has no rows at \d+ positions: \[{hole}[,\]]"):
            rows.assemble(HOOK, [(start, start + count)])


def test_a_preempted_request_is_told_apart_by_position_not_by_order() -> None:
    rows = JobRows("tag")
    rows.add(HOOK, 0, VALUES[0:8])
    rows.add(HOOK, 8, VALUES[8:16])
    rows.add(HOOK, 0, VALUES[0:16] + 0.5)  # preempted and computed again in one piece
    rows.add(HOOK, 16, VALUES[16:17])
    assert [start for start, _ in rows.assemble(HOOK, [(2, 3), (6, 17)])] == [2, 6]
    got = np.concatenate([array for _, array in rows.assemble(HOOK, [(2, 3), (6, 17)])])
    expected = np.concatenate([VALUES[2:3] + 0.5, VALUES[6:16] + 0.5, VALUES[16:17]])
    assert np.array_equal(got, expected)


def test_bytes_and_first_failure_are_kept() -> None:
    rows = JobRows("tag")
    rows.add(HOOK, 0, torch.zeros(3, 5, dtype=torch.bfloat16))
    rows.add("ln_final.hook_out", 0, torch.zeros(2, 5))
    assert rows.bytes == 3 * 5 * 2 + 2 * 5 * 4
    rows.fail("first")
    rows.fail("second")
    assert rows.error == "first"


def test_bfloat16_is_kept_bit_for_bit() -> None:
    values = torch.tensor([[1.5, -0.0, float("inf"), float("nan"), 3e-39]], dtype=torch.bfloat16)
    array = to_numpy(values)
    assert array.dtype == ml_dtypes.bfloat16
    assert array.view(np.uint16).tolist() == values.view(torch.uint16).tolist()


@pytest.mark.parametrize("spans", [[(2, 5)], [(0, 1), (3, 4), (8, 10)]])
def test_gathered_rows_do_not_alias_the_tensor(spans: list[tuple[int, int]]) -> None:
    """A fused norm overwrites what a hook has seen."""
    tensor = VALUES[:10].clone()
    got = gather(tensor, spans)
    tensor.zero_()
    assert torch.equal(got, torch.cat([VALUES[a:b] for a, b in spans]))
