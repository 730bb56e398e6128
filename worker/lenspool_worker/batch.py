"""The plan of one engine step: which rows of the batch belong to which job, by absolute position.

Pure bookkeeping over ints, so that it can be tested against a naive reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lenspool_cache.ranges import OpenRange
from lenspool_worker.capture import JobRows
from lenspool_worker.edits import Edit


@dataclass(frozen=True)
class Tracked:
    """What a request in the engine wants, by site.

    Attributes
    ----------
    captures
        Groups of sites that want the same positions.
    edits
        In the order in which they apply.
    """

    rows: JobRows
    captures: list[tuple[list[int], list[OpenRange]]]
    edits: list[tuple[int, Edit]]


class Slice(NamedTuple):
    """Rows `[start, stop)` of the step's batch; the first one is at absolute position `position`."""

    start: int
    stop: int
    position: int
    job: JobRows


class EditSlice(NamedTuple):
    """Rows of the step's batch that an edit applies to; the first one is number `first` of the edit's positions."""

    start: int
    stop: int
    first: int
    edit: Edit
    job: JobRows


@dataclass
class StepPlan:
    """Per site, in the order of the batch: rows to copy and rows to edit."""

    captures: dict[int, list[Slice]] = field(default_factory=dict)
    edits: dict[int, list[EditSlice]] = field(default_factory=dict)


def plan_step(
    request_ids: Sequence[str],
    starts: Iterable[int],
    counts: Iterable[int],
    tracked: Mapping[str, Tracked],
    tokens: Callable[[int, int], Sequence[int]],
) -> StepPlan | None:
    """Plan a step.

    Parameters
    ----------
    request_ids
        In the order of the batch's rows.
    starts
        Absolute position of each request's first row in this step.
    counts
        Rows of each request in this step.
    tracked
        Requests that want something; others only take up rows.
    tokens
        Gives the token ids of rows `[start, stop)` of the batch; asked only for edits that are bound to tokens.

    Returns
    -------
    StepPlan or None
        None when no row of this step is wanted.
    """
    plan = StepPlan()
    row = 0
    for request_id, start, count in zip(request_ids, starts, counts, strict=True):
        start, count = int(start), int(count)
        wants = tracked.get(request_id)
        if wants is not None:
            offset, stop = row - start, start + count
            for sites, ranges in wants.captures:
                slices = [Slice(a + offset, b + offset, a, wants.rows) for a, b in _overlaps(ranges, start, stop)]
                if slices:
                    for site in sites:
                        plan.captures.setdefault(site, []).extend(slices)
            for site, edit in wants.edits:
                pieces = _pieces(edit, start, stop, offset, tokens)
                edits = [EditSlice(a, b, first, edit, wants.rows) for a, b, first in pieces]
                if edits:
                    plan.edits.setdefault(site, []).extend(edits)
        row += count
    return plan if plan.captures or plan.edits else None


def _pieces(
    edit: Edit, start: int, stop: int, offset: int, tokens: Callable[[int, int], Sequence[int]]
) -> Iterable[tuple[int, int, int]]:
    """Rows of the batch that an edit applies to, and the place of their first among the edit's positions."""
    before = 0
    for low, high in edit.ranges:
        for a, b in _overlaps([(low, high)], start, stop):
            if edit.tokens is None:
                yield a + offset, b + offset, before + a - low
                continue
            for row, token in enumerate(tokens(a + offset, b + offset), a + offset):
                if token in edit.tokens:
                    yield row, row + 1, before + row - offset - low
        before += 0 if high is None else high - low


def _overlaps(ranges: Iterable[OpenRange], start: int, stop: int) -> Iterable[tuple[int, int]]:
    for a, b in ranges:
        low, high = max(a, start), stop if b is None else min(b, stop)
        if low < high:
            yield low, high
