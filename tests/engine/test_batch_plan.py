"""The plan of a step, against a reference that looks at every token by itself."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lenspool_cache.ranges import OpenRange, merge
from lenspool_worker.batch import Tracked, plan_step
from lenspool_worker.capture import JobRows
from lenspool_worker.edits import Edit

SITES = 3


@st.composite
def ranges(draw: st.DrawFn) -> list[OpenRange]:
    """Disjoint ranges below 60; the last one may be open."""
    pairs = draw(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 10)), max_size=4))
    closed: list[OpenRange] = [*merge((a, a + n) for a, n in pairs)]
    if closed and draw(st.booleans()):
        closed[-1] = (closed[-1][0], None)
    return closed


@st.composite
def edits(draw: st.DrawFn) -> Edit:
    tokens = draw(st.none() | st.frozensets(st.integers(0, 4)))
    return Edit("zero", draw(ranges()), tokens=tokens)


@st.composite
def tracked(draw: st.DrawFn) -> Tracked:
    sites = st.lists(st.integers(0, SITES - 1), unique=True, max_size=SITES)
    captures = draw(st.lists(st.tuples(sites, ranges()), max_size=3))
    return Tracked(JobRows("tag"), captures, draw(st.lists(st.tuples(st.integers(0, SITES - 1), edits()), max_size=3)))


steps = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12), st.none() | tracked()), min_size=1, max_size=6)


def token(row: int) -> int:
    """The token of a row of the batch."""
    return row * 7 % 5


def tokens(start: int, stop: int) -> Sequence[int]:
    return [token(row) for row in range(start, stop)]


def inside(position: int, wanted: list[OpenRange]) -> bool:
    return any(a <= position and (b is None or position < b) for a, b in wanted)


def place(position: int, wanted: list[OpenRange]) -> int:
    """How many selected positions come before one."""
    return sum(inside(p, wanted) for p in range(position))


@given(steps)
def test_plan_equals_a_look_at_every_token(step: list[tuple[int, int, Tracked | None]]) -> None:
    captures, edited, row = [], [], 0
    for start, count, wants in step:
        for position in range(start, start + count):
            if wants is not None:
                for sites, wanted in wants.captures:
                    captures += [(s, row, position, id(wants.rows)) for s in sites if inside(position, wanted)]
                for s, edit in wants.edits:
                    if inside(position, edit.ranges) and (edit.tokens is None or token(row) in edit.tokens):
                        edited.append((s, row, place(position, edit.ranges), id(edit), id(wants.rows)))
            row += 1

    ids = [f"request-{i}" for i in range(len(step))]
    by_id = {name: wants for name, (_, _, wants) in zip(ids, step, strict=True) if wants is not None}
    plan = plan_step(ids, [s for s, _, _ in step], [n for _, n, _ in step], by_id, tokens)

    assert (plan is None) == (not captures and not edited)
    planned_captures, planned_edits = [], []
    if plan is not None:
        for site, slices in plan.captures.items():
            for piece in slices:
                for k in range(piece.stop - piece.start):
                    planned_captures.append((site, piece.start + k, piece.position + k, id(piece.job)))
        for site, pieces in plan.edits.items():
            for p in pieces:
                for k in range(p.stop - p.start):
                    planned_edits.append((site, p.start + k, p.first + k, id(p.edit), id(p.job)))
    assert sorted(planned_captures) == sorted(captures)
    assert sorted(planned_edits) == sorted(edited)


def test_edits_of_one_place_keep_their_order() -> None:
    first, second = Edit("scale", [(0, 5)], {"factor": 2.0}), Edit("zero", [(0, 5)])
    wants = Tracked(JobRows("tag"), [], [(0, first), (0, second)])
    plan = plan_step(["a", "b"], [0, 2], [4, 1], {"a": wants, "b": wants}, tokens)
    assert plan is not None
    assert [(p.start, p.stop, p.edit) for p in plan.edits[0]] == [
        (0, 4, first), (0, 4, second), (4, 5, first), (4, 5, second),
    ]  # fmt: skip


def test_a_step_without_wanted_rows_has_no_plan() -> None:
    wants = Tracked(JobRows("tag"), [([0], [(8, None)])], [])
    assert plan_step(["a"], [0], [8], {"a": wants}, tokens) is None
    assert plan_step(["a"], [0], [9], {}, tokens) is None
