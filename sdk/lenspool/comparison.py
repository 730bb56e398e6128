"""Two captures against each other: how far apart, at which hook and position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from lenspool.errors import InvalidJob
from lenspool.layout import label, layout, rows, with_rows
from lenspool.readouts import Readout

if TYPE_CHECKING:
    from lenspool.result import Capture

_SHOWN = 8


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Distances of the second capture from the first, in float64.

    Attributes
    ----------
    hooks
        Canonical names.
    positions
        Absolute positions that both have.
    tokens
        The first capture's, at these positions.
    relative
        `[hooks, positions]`: L2 norm of the difference by that of the first's row; 0 where both are zero, infinite
        where only the first is, NaN where either is or where a readout has no row.
    max_abs
        `[hooks, positions]`: largest absolute difference.
    """

    hooks: list[str]
    positions: np.ndarray
    tokens: list[str]
    relative: np.ndarray
    max_abs: np.ndarray

    def __repr__(self) -> str:
        worst = np.nan_to_num(self.relative, nan=-1.0).max(1)
        lines = [f"<Comparison of {len(self.hooks)} hooks x {len(self.positions)} positions; largest relative L2 first"]
        for i in np.argsort(-worst, kind="stable")[:_SHOWN]:
            known = np.nan_to_num(self.relative[i], nan=-1.0)
            at = int(known.argmax())
            lines.append(
                f"  {self.hooks[i]}  {self.relative[i, at]:.3g} (max abs {self.max_abs[i, at]:.3g}) "
                f"at {self.positions[at]} {self.tokens[at]}"
            )
        return "\n".join(lines) + ">"


def compare(
    first: Capture, second: Capture, hooks: str | Readout | Sequence[str | Readout] | None = None
) -> Comparison:
    """See `Capture.compare`."""
    both = [name for name in with_rows(first) if name in with_rows(second)]
    if hooks is not None:
        asked = [hooks] if isinstance(hooks, (str, Readout)) else list(hooks)
        both = list(dict.fromkeys(name for item in asked for name in _found(first, second, item, both)))
    common = np.intersect1d(first.positions, second.positions)
    if not both or not len(common):
        what = "position" if both else "hook"
        raise InvalidJob("other", f"no {what} is in both captures", f"captures with {what}s in common")
    relative, max_abs = np.full((2, len(both), len(common)), np.nan)
    for i, name in enumerate(both):
        a, b = _at(first, name, common), _at(second, name, common)
        there = np.isin(common, np.intersect1d(a[1], b[1]))
        one, two = (rows_[np.isin(positions, common[there])] for rows_, positions in (a, b))
        if layout(first, name).dims[-1] == "key":  # keys behind the shorter prompt are masked for all common queries
            keys = min(one.shape[-1], two.shape[-1])
            one, two = one[..., :keys], two[..., :keys]
        if one.shape != two.shape:
            raise InvalidJob("other", f"{name} has rows {two.shape[1:]}", f"rows {one.shape[1:]}, as the first has")
        one, two = one.reshape(len(one), -1), two.reshape(len(two), -1)
        difference, length = np.linalg.norm(two - one, axis=1), np.linalg.norm(one, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            relative[i, there] = np.where((difference == 0) & (length == 0), 0.0, difference / length)
        max_abs[i, there] = np.abs(two - one).max(1)
    return Comparison(both, common, [label(first, int(p)) for p in common], relative, max_abs)


def _found(first: Capture, second: Capture, item: str | Readout, both: Sequence[str]) -> list[str]:
    if isinstance(item, str) and any(c in item for c in "*?") and "|" not in item:
        return [name for name in both if fnmatchcase(name, item)]
    name = first.canonical(item)
    second.canonical(item)
    if name not in both:
        raise InvalidJob("hooks", f"{name} has no row for each position in one array", ", ".join(both))
    return [name]


def _at(capture: Capture, name: str, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and their positions, among those given."""
    own = layout(capture, name).positions
    assert own is not None
    chosen = np.isin(own, positions)
    return rows(capture, name)[chosen], own[chosen]
