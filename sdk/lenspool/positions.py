"""Positions: from what people write to half-open ranges of absolute token positions.

`"all"`, `"last"`, `"prompt"`, `"generated"`, an int (negative: from the end of the prompt), a list of ints, a slice. In
the calls of a client also `at("Paris")`, by itself or in a list (`lenspool.places`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from lenspool.errors import InvalidJob
from lenspool_cache import ranges as rg
from lenspool_cache.ranges import OpenRange

ALLOWED = '"all", "last", "prompt", "generated", an int, a list of ints, or a slice'
PHASES = ("all", "prompt", "generated")


def resolve(positions: Any, n_prompt: int, *, generating: bool, field: str = "positions") -> list[OpenRange]:
    """Resolve positions against a prompt.

    Parameters
    ----------
    positions
        See the module's head. `"last"` is the last prompt token. Ints must lie in the prompt.
    n_prompt
        Number of prompt tokens.
    generating
        Whether tokens will be generated: then `"all"` and `"generated"` reach to the end of the generation.

    Returns
    -------
    list[OpenRange]
        Sorted, disjoint; the last one may be open.

    Raises
    ------
    InvalidJob
        Another type, empty, or out of range.
    """
    if isinstance(positions, str):
        return _named(positions, n_prompt, generating, field)
    if isinstance(positions, slice):
        try:
            chosen = list(range(n_prompt))[positions]
        except (TypeError, ValueError) as error:
            raise InvalidJob(field, f"bad slice: {error}", ALLOWED) from None
    else:
        chosen = _integers(positions, n_prompt, field)
    if not chosen:
        raise InvalidJob(field, f"{positions!r} selects no position of a prompt of {n_prompt} tokens", ALLOWED)
    return list(rg.from_positions(chosen))


def ordered(positions: Any, n_prompt: int, *, generating: bool, field: str = "positions") -> list[int] | None:
    """The same positions one by one, in the order in which they were given; None where they have no end."""
    if isinstance(positions, str):
        ranges = _named(positions, n_prompt, generating, field)
        return None if ranges[-1][1] is None else rg.positions(rg.close(ranges, n_prompt))
    if isinstance(positions, slice):
        return list(range(n_prompt))[positions]
    return _integers(positions, n_prompt, field)


def _named(name: str, n_prompt: int, generating: bool, field: str) -> list[OpenRange]:
    if name == "all":
        return [(0, None if generating else n_prompt)]
    if name == "prompt":
        return [(0, n_prompt)]
    if name == "last":
        return [(n_prompt - 1, n_prompt)]
    if name == "generated":
        if not generating:
            raise InvalidJob(field, '"generated" in a call that generates nothing', '"all", "last", "prompt", ints')
        return [(n_prompt, None)]
    raise InvalidJob(field, f"got {name!r}", ALLOWED)


def _integers(positions: Any, n_prompt: int, field: str) -> list[int]:
    items = positions if isinstance(positions, Iterable) and getattr(positions, "ndim", 1) != 0 else [positions]
    out = []
    for item in items:
        if isinstance(item, bool) or type(item).__name__ in ("bool_", "bool"):
            raise InvalidJob(field, f"got the truth value {item!r}", ALLOWED)
        try:
            index = operator.index(item)
        except TypeError:
            raise InvalidJob(field, f"got {item!r}", ALLOWED) from None
        if not -n_prompt <= index < n_prompt:
            raise InvalidJob(field, f"position {index} is outside the prompt", f"{-n_prompt}..{n_prompt - 1}")
        out.append(index % n_prompt)
    return out


def in_phase(ranges: list[OpenRange], phase: str, n_prompt: int, *, field: str = "phase") -> list[OpenRange]:
    """Keep the part of the ranges that lies in a phase: `"all"`, `"prompt"` (prefill) or `"generated"` (decode).

    Raises
    ------
    InvalidJob
        Unknown phase, or nothing is left.
    """
    if phase not in PHASES:
        raise InvalidJob(field, f"got {phase!r}", '"all", "prompt" or "generated"')
    if phase == "all":
        return ranges
    out: list[OpenRange] = []
    for start, stop in ranges:
        if phase == "prompt":
            start, stop = start, n_prompt if stop is None else min(stop, n_prompt)
        else:
            start = max(start, n_prompt)
        if stop is None or start < stop:
            out.append((start, stop))
    if not out:
        raise InvalidJob(field, f"no selected position lies in the phase {phase!r}", '"all", "prompt" or "generated"')
    return out


def check_ranges(ranges: Any, field: str, end: int | None, *, may_be_open: bool) -> None:
    """Check ranges in JSON form: sorted, disjoint ints from 0 to `end`; the last may be open where that is allowed.

    Raises
    ------
    InvalidJob
        Naming the field.
    """
    allowed = "sorted, disjoint [start, stop) pairs" + (f" within 0..{end}" if end is not None else "")
    last = 0
    if not isinstance(ranges, list) or not ranges:
        raise InvalidJob(field, "not a list, or empty", allowed)
    for i, pair in enumerate(ranges):
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not int or pair[0] < last:
            raise InvalidJob(field, f"got {pair!r}", allowed)
        start, stop = pair
        if stop is None:
            if not may_be_open or i + 1 < len(ranges):
                raise InvalidJob(field, f"got the open range {pair!r}", allowed)
            continue
        if type(stop) is not int or stop <= start or (end is not None and stop > end):
            raise InvalidJob(field, f"got {pair!r}", allowed)
        last = stop
