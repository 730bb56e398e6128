"""Edits on plain tensors and on a stream that is a sum of two, over NaN, Infinity and large cancelling numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from lenspool.edit_forms import FORMS
from lenspool_worker.batch import EditSlice, Slice, StepPlan
from lenspool_worker.capture import JobRows
from lenspool_worker.edits import OPERATIONS, Edit, from_document
from lenspool_worker.taps import TAPS, Taps, tap, tap_experts, tap_stream

VECTOR = torch.tensor([1.0, -2.0, 3.0, 0.5])
ROWS = torch.arange(8.0).reshape(2, 4)
BAD = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
ADD = Edit("add", numbers={"coefficient": 2.0}, value=VECTOR)


def taps_with(edits: Sequence[Edit], start: int, stop: int, job: JobRows, taps: Taps | None = None) -> Taps:
    """One site, edited and captured at rows [start, stop)."""
    taps = taps or Taps()
    site = taps.site("here", 4)
    pieces = [EditSlice(start, stop, 0, edit, job) for edit in edits]
    taps.plan = StepPlan({site: [Slice(start, stop, 10, job)]}, {site: pieces})
    return taps


def captured(job: JobRows, count: int) -> np.ndarray:
    assert job.error is None
    return job.assemble("here", [(10, 10 + count)])[0][1]


@pytest.fixture
def process_taps() -> Iterator[Taps]:
    """The taps that the custom ops of this process call, as they were afterwards."""
    names = list(TAPS.names)
    yield TAPS
    TAPS.plan = None
    del TAPS.names[len(names) :], TAPS._widths[len(names) :]


D = torch.tensor([[3.0, 0.0, 4.0, 0.0], [0.0, 2.0, 0.0, 0.0]])
ARRAYS = {"row": VECTOR, "rows": torch.arange(12.0).reshape(3, 4), "directions": D, "part": torch.tensor([7.0, 9.0])}

CASES: dict[str, tuple[dict[str, object], torch.Tensor]] = {
    "zero": ({"op": "zero"}, torch.zeros(2, 4)),
    "scale": ({"op": "scale", "factor": -0.5}, ROWS * -0.5),
    "add": ({"op": "add", "value": {"array": "row"}, "coefficient": 3.0}, ROWS + 3 * VECTOR),
    "add number": ({"op": "add", "value": 0.25, "coefficient": 2.0}, ROWS + 0.5),
    "set": ({"op": "set", "value": {"array": "row"}}, VECTOR.expand(2, 4)),
    "set number": ({"op": "set", "value": -7.0}, torch.full((2, 4), -7.0)),
    "set rows": ({"op": "set", "value": {"array": "rows", "rows": [[2, 3], [0, 1]]}}, ARRAYS["rows"][[2, 0]]),
    "set part": (
        {"op": "set", "value": {"array": "part"}, "columns": [[0, 1], [3, 4]]},
        torch.tensor([[7.0, 1.0, 2.0, 9.0], [7.0, 5.0, 6.0, 9.0]]),
    ),
    "add part of a whole": (
        {"op": "add", "value": {"array": "row"}, "coefficient": 1.0, "columns": [[1, 3]]},
        ROWS + torch.tensor([0.0, -2.0, 3.0, 0.0]),
    ),
    "interpolate": ({"op": "interpolate", "alpha": 0.25, "value": 8.0}, 0.75 * ROWS + 2.0),
    # |x| is sqrt(14) and sqrt(126); x + 2v is (2, -3, 8, 4) and (6, 1, 12, 8)
    "preserve": (
        {"op": "steer", "norm": "preserve", "coefficient": 2.0, "value": {"array": "row"}},
        torch.tensor([[2.0, -3.0, 8.0, 4.0], [6.0, 1.0, 12.0, 8.0]])
        * torch.tensor([[(14 / 93) ** 0.5], [(126 / 245) ** 0.5]]),
    ),
    "match": (  # |v| is sqrt(14.25)
        {"op": "steer", "norm": "match", "coefficient": -0.5, "value": {"array": "row"}},
        ROWS - 0.5 * VECTOR * torch.tensor([[(14 / 14.25) ** 0.5], [(126 / 14.25) ** 0.5]]),
    ),
    # along (0.6, 0, 0.8, 0) the rows have 1.6 and 7.2
    "project_out": (
        {"op": "project_out", "coefficient": 1.0, "value": {"array": "directions"}},
        torch.tensor([[-0.96, 0.0, 0.72, 3.0], [4 - 4.32, 0.0, 6 - 5.76, 7.0]]),
    ),
    "clamp": (
        {"op": "clamp", "min": None, "max": 2.0, "value": {"array": "row"}},
        # along v / sqrt(14.25) they have 5.5 and 15.5 over that length
        ROWS
        + (torch.tensor([[2.0], [2.0]]) - torch.tensor([[5.5], [15.5]]) / 14.25**0.5).clamp(max=0)
        * (VECTOR / 14.25**0.5),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_op_does_what_it_says(name: str) -> None:
    document, expected = CASES[name]
    rows = ROWS.clone()
    got = from_document({"ranges": [[0, 2]], **document}, ARRAYS.__getitem__, 4).apply(rows)
    assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6), document
    assert torch.equal(rows, ROWS), "the argument is left alone"


def test_every_op_has_a_case_and_a_form() -> None:
    ops = {str(document.get("norm", document["op"])) for document, _ in CASES.values()}
    assert ops == set(OPERATIONS)
    assert {str(document["op"]) for document, _ in CASES.values()} == set(FORMS)


def test_a_later_chunk_takes_its_own_rows() -> None:
    edit = from_document({"ranges": [[0, 3]], **CASES["set rows"][0]}, ARRAYS.__getitem__, 4)
    assert torch.equal(edit.apply(torch.zeros(1, 4), 1), ARRAYS["rows"][[0]])


def test_norms_and_bounds_leave_alone_what_they_should() -> None:
    """A row without length stays without direction; a component within its bounds keeps its bits."""
    steer = {"ranges": [[0, None]], "op": "steer", "norm": "preserve", "coefficient": 1.0, "value": {"array": "row"}}
    moved = from_document(steer, ARRAYS.__getitem__, 4).apply(torch.stack([torch.zeros(4), -VECTOR]))
    assert torch.equal(moved, torch.zeros(2, 4))
    bounds = {"ranges": [[0, None]], "op": "clamp", "min": -100.0, "max": 100.0, "value": {"array": "row"}}
    assert torch.equal(from_document(bounds, ARRAYS.__getitem__, 4).apply(ROWS), ROWS)


@pytest.mark.parametrize("directions", [torch.zeros(4), torch.zeros(2, 4), torch.stack([VECTOR, 2 * VECTOR])])
def test_directions_that_have_no_span_are_refused(directions: torch.Tensor) -> None:
    document = {"ranges": [[0, 1]], "op": "project_out", "coefficient": 1.0, "value": {"array": "x"}}
    with pytest.raises(ValueError, match="zero"):
        from_document(document, {"x": directions}.__getitem__, 4)


def test_set_does_not_hand_out_the_vector_itself() -> None:
    Edit("set", value=VECTOR).apply(torch.zeros(2, 4)).fill_(9.0)
    assert VECTOR.tolist() == [1.0, -2.0, 3.0, 0.5]


@pytest.mark.parametrize("edit", [Edit("zero"), Edit("set", value=VECTOR), Edit("set", value=2.5)], ids=lambda e: e.op)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_assigning_edits_leave_nothing_of_nan_and_infinity(edit: Edit, dtype: torch.dtype) -> None:
    """In a tensor, and in both parts of a stream; the rows around it stay as they are, bit for bit."""
    expected = edit.apply(torch.zeros(2, 4))
    hidden, residual = BAD.repeat(5, 1).to(dtype), BAD.flip(0).repeat(5, 1).to(dtype)
    untouched = hidden.clone(), residual.clone()

    job = JobRows("plain")
    plain = hidden.clone()
    taps_with([edit], 1, 3, job).plain(plain, 0)
    assert torch.equal(plain[1:3].float(), expected)
    assert np.array_equal(captured(job, 2).astype(np.float32), expected.numpy())
    assert same_bits(plain[[0, 3, 4]], untouched[0][[0, 3, 4]])

    job = JobRows("stream")
    taps_with([edit], 1, 3, job).stream(hidden, residual, 0)
    assert torch.equal((hidden + residual)[1:3].float(), expected)
    assert np.array_equal(captured(job, 2).astype(np.float32), expected.numpy())
    for got, was in zip((hidden, residual), untouched, strict=True):
        assert same_bits(got[[0, 3, 4]], was[[0, 3, 4]])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_add_moves_the_stream_by_exactly_one_rounding() -> None:
    """bfloat16 halves of 1e4 that cancel: the new stream is the exact sum plus the vector, rounded once."""
    generator = torch.Generator().manual_seed(0)
    residual = (torch.randn(6, 4, generator=generator) + torch.tensor([1e4, -1e4, 0.0, 3.0])).bfloat16()
    hidden = (torch.randn(6, 4, generator=generator) - torch.tensor([1e4, -1e4, 0.0, 1.0])).bfloat16()
    exact = hidden.double() + residual.double() + 2 * VECTOR.double()
    job = JobRows("tag")
    taps_with([ADD], 0, 6, job).stream(hidden, residual, 0)
    assert torch.equal(hidden + residual, exact.float().bfloat16())
    assert np.array_equal(captured(job, 6).astype(np.float64), exact.float().bfloat16().double().numpy())


@pytest.mark.parametrize("name", CASES)
def test_an_edit_of_large_cancelling_halves_loses_one_rounding(name: str) -> None:
    """Every op on a bfloat16 stream of 1e4, against float64 on the exact sum: half a unit in the last place of
    bfloat16, and what float32 loses at the size of the row.
    """
    generator = torch.Generator().manual_seed(1)
    large = torch.tensor([1e4, -1e4, 0.0, 3.0])
    residual = (torch.randn(2, 4, generator=generator) + large).bfloat16()
    hidden = (torch.randn(2, 4, generator=generator) - large / 2).bfloat16()
    edit = from_document({"ranges": [[0, 2]], **CASES[name][0]}, ARRAYS.__getitem__, 4)
    value = edit.value.double() if isinstance(edit.value, torch.Tensor) else edit.value
    stream = hidden.double() + residual.double()
    exact = dataclasses.replace(edit, value=value).apply(stream)
    job = JobRows("tag")
    taps_with([edit], 0, 2, job).stream(hidden, residual, 0)
    half_a_unit = torch.finfo(torch.bfloat16).eps / 2 * exact.abs()
    in_float32 = 8 * torch.finfo(torch.float32).eps * stream.abs().max()
    assert ((hidden.double() + residual.double() - exact).abs() <= half_a_unit + in_float32).all()
    assert np.array_equal(captured(job, 2).astype(np.float64), (hidden + residual).double().numpy())


def test_edits_apply_in_order_and_captures_come_after_them() -> None:
    tensor = torch.ones(3, 4)
    job = JobRows("tag")
    taps_with([Edit("scale", numbers={"factor": 4.0}), ADD, Edit("scale", numbers={"factor": 0.5})], 0, 2, job).plain(
        tensor, 0
    )
    expected = (torch.full((4,), 4.0) + 2 * VECTOR) * 0.5
    assert torch.equal(tensor, torch.stack([expected, expected, torch.ones(4)]))
    assert np.array_equal(captured(job, 2), expected.repeat(2, 1).numpy())


def test_two_jobs_in_one_tensor_do_not_meet() -> None:
    tensor = torch.arange(24.0).reshape(6, 4)
    first, second = JobRows("first"), JobRows("second")
    taps = Taps()
    site = taps.site("here", 4)
    taps.plan = StepPlan(
        {site: [Slice(0, 2, 10, first), Slice(3, 6, 10, second)]}, {site: [EditSlice(0, 2, 0, Edit("zero"), first)]}
    )
    expected = tensor.clone()
    expected[:2] = 0
    taps.plain(tensor, site)
    assert torch.equal(tensor, expected)
    assert np.array_equal(captured(first, 2), expected[:2].numpy())
    assert np.array_equal(captured(second, 3), expected[3:].numpy())


def test_a_failing_edit_is_charged_to_its_job_alone() -> None:
    tensor = torch.ones(4, 4)
    bad, good = JobRows("bad"), JobRows("good")
    taps = Taps()
    site = taps.site("here", 4)
    wrong = Edit("add", numbers={"coefficient": 1.0}, value=torch.ones(5))
    taps.plan = StepPlan(
        {site: [Slice(0, 2, 10, bad), Slice(2, 4, 10, good)]},
        {site: [EditSlice(0, 2, 0, wrong, bad), EditSlice(2, 4, 0, Edit("zero"), good)]},
    )
    taps.plain(tensor, site)
    assert bad.error is not None and bad.error.startswith("add: ")
    assert np.array_equal(captured(good, 2), np.zeros((2, 4)))


def test_the_custom_ops_reach_this_process_taps(process_taps: Taps) -> None:
    job = JobRows("tag")
    taps_with([ADD], 0, 2, job, process_taps)
    site = len(process_taps.names) - 1
    process_taps.plan = StepPlan({site: [Slice(0, 2, 10, job)]}, {site: [EditSlice(0, 2, 0, ADD, job)]})
    hidden, residual = torch.ones(3, 4), torch.ones(3, 4)
    tap_stream(hidden, residual, site)
    assert torch.equal(hidden + residual, torch.stack([2 + 2 * VECTOR, 2 + 2 * VECTOR, torch.full((4,), 2.0)]))
    tap(hidden, site)
    assert torch.equal(hidden[0], 2 * VECTOR)
    process_taps.plan = None
    tap(hidden, site)
    assert torch.equal(hidden[0], 2 * VECTOR)


def test_the_custom_ops_are_well_formed() -> None:
    """torch's own check of the schema, mutation, fake implementation and tracing of a custom op."""
    torch.library.opcheck(tap, (torch.ones(3, 4), 0))
    torch.library.opcheck(tap_stream, (torch.ones(3, 4), torch.ones(3, 4), 0))
    torch.library.opcheck(tap_experts, (torch.ones(3, 2), torch.ones(3, 2, dtype=torch.int32), 0, 1))
