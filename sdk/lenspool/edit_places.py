"""Where an edit applies: positions, heads and units, as canonical pieces of its document."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lenspool import positions as ps
from lenspool.card import HookInfo
from lenspool.errors import InvalidJob
from lenspool_cache import ranges as rg
from lenspool_cache.ranges import OpenRange


@dataclass(frozen=True)
class Selection:
    """Positions of an edit.

    Attributes
    ----------
    ranges
        Canonical; the last may be open.
    order
        Positions in the order in which they were given, before phase and tokens took some away: what a row per position
        goes by. None where they reach to the end of a generation.
    tokens
        Token ids to which the edit is bound in what is generated.
    """

    ranges: list[OpenRange]
    order: list[int] | None
    tokens: list[int] | None


def select(where: Mapping[str, Any], tokens: Sequence[int], vocabulary: int, at: str, *, generating: bool) -> Selection:
    """Resolve `positions`, `phase` and `where_token` of an intervention against a prompt.

    Raises
    ------
    InvalidJob
        Naming the word; also when no position is left.
    """
    count = len(tokens)
    positions = where.get("positions", "all")
    ranges = ps.resolve(positions, count, generating=generating, field=f"{at}.positions")
    order = ps.ordered(positions, count, generating=generating, field=f"{at}.positions")
    ranges = ps.in_phase(ranges, where.get("phase", "all"), count, field=f"{at}.phase")
    wanted = where.get("where_token")
    if wanted is None:
        return Selection(ranges, order, None)
    ids = set(_integers(wanted, vocabulary, f"{at}.where_token", "token ids", negative=False))
    found = rg.from_positions(p for p in rg.positions(rg.close(ranges, count)) if tokens[p] in ids)
    later = [(max(start, count), stop) for start, stop in ranges if stop is None or stop > count]
    if not found and not later:
        reason = f"none of the tokens {sorted(ids)[:8]} is at a selected position"
        raise InvalidJob(f"{at}.where_token", reason, "tokens of the prompt")
    if found and later and found[-1][1] == later[0][0]:
        later[0] = (found.pop()[0], later[0][1])
    return Selection([*found, *later], order, sorted(ids) if later else None)


@dataclass(frozen=True)
class Columns:
    """The part of a row that is edited.

    Attributes
    ----------
    order
        Heads or units as they were given.
    head_size
        `d_head`; None for units.
    """

    order: list[int]
    head_size: int | None

    @property
    def indices(self) -> np.ndarray:
        """Numbers of the row, in the order given."""
        if self.head_size is None:
            return np.array(self.order)
        return (np.array(self.order)[:, None] * self.head_size + np.arange(self.head_size)).ravel()

    @property
    def parts(self) -> list[list[int]]:
        """`[start, stop)` pairs in ascending order."""
        return [list(r) for r in rg.from_positions(self.indices.tolist())]


def columns_of(where: Mapping[str, Any], hook: HookInfo, at: str) -> Columns | None:
    """Resolve `heads` or `units` of an intervention at a hook.

    Raises
    ------
    InvalidJob
        The hook has no heads, or there are not as many.
    """
    heads, units = where.get("heads"), where.get("units")
    if heads is not None and units is not None:
        raise InvalidJob(f"{at}.units", "was given together with heads", "one of them")
    if heads is not None:
        if len(hook.dims) != 2:
            raise InvalidJob(f"{at}.heads", f"{hook.name} has no heads", "attn.hook_q, hook_k, hook_v, hook_z")
        return Columns(_integers(heads, hook.dims[0], f"{at}.heads", f"heads of {hook.name}"), hook.dims[1])
    if units is not None:
        return Columns(_integers(units, hook.width, f"{at}.units", f"units of {hook.name}"), None)
    return None


def _integers(values: Any, limit: int, field: str, what: str, *, negative: bool = True) -> list[int]:
    """Ints below a limit, without repeats, in the order given; negative ones count from the end."""
    lowest = -limit if negative else 0
    allowed = f"{what}: ints in {lowest}..{limit - 1}"
    iterable = isinstance(values, Iterable) and not isinstance(values, str) and getattr(values, "ndim", 1) != 0
    out = []
    for item in values if iterable else [values]:
        if isinstance(item, (bool, np.bool_)):
            raise InvalidJob(field, f"got {item!r}", allowed)
        try:
            number = operator.index(item)
        except TypeError:
            raise InvalidJob(field, f"got {item!r}", allowed) from None
        if not lowest <= number < limit:
            raise InvalidJob(field, f"got {number}", allowed)
        out.append(number % limit)
    if not out or len(set(out)) < len(out):
        raise InvalidJob(field, "is empty" if not out else f"names one twice: {out}", allowed)
    return out
