"""The arithmetic of interventions, on rows (`lenspool.interventions` has the formulas).

Float32 whatever the model's dtype, cast back once by the caller. `zero` and `set` assign: what was there, NaN or
Infinity included, does not survive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from lenspool_cache import ranges as rg
from lenspool_cache.ranges import OpenRange

Value: TypeAlias = float | torch.Tensor
"""A number, `[width]`, or `[n, width]`: a row for each of the rows that are edited."""


@dataclass(frozen=True, eq=False)
class Edit:
    """One edit at one hook, ready to apply.

    Attributes
    ----------
    ranges
        Absolute positions.
    numbers
        The op's own numbers.
    value
        Number, or float32 tensor on the engine's device: `[width]`, or `[k, width]` (directions; rows of `rows`).
    rows
        For each position of the ranges the row of `value` that it takes; None: all take the same.
    columns
        Indices of the numbers that are edited; None: all.
    tokens
        Token ids to which it is bound; None: all.
    """

    op: str
    ranges: list[OpenRange] = field(default_factory=lambda: [(0, None)])
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    value: Value = 0.0
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    tokens: frozenset[int] | None = None

    def apply(self, rows: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Edited rows of float32 rows `[n, width]`; the argument is left alone.

        Parameters
        ----------
        first
            Place of the first row among the positions of the edit.
        """
        operation = OPERATIONS[self.op]
        value = self.value
        if self.rows is not None:
            assert isinstance(value, torch.Tensor)
            value = value[self.rows[first : first + len(rows)]]
        if self.columns is None:
            return operation(rows, value, **self.numbers)
        out = rows.clone()
        out[:, self.columns] = operation(rows[:, self.columns], value, **self.numbers)
        return out


def _zero(rows: torch.Tensor, value: Value) -> torch.Tensor:
    return torch.zeros_like(rows)


def _scale(rows: torch.Tensor, value: Value, factor: float) -> torch.Tensor:
    return rows * factor


def _add(rows: torch.Tensor, value: Value, coefficient: float) -> torch.Tensor:
    return rows + value * coefficient


def _set(rows: torch.Tensor, value: Value) -> torch.Tensor:
    return value.expand_as(rows).clone() if isinstance(value, torch.Tensor) else torch.full_like(rows, value)


def _interpolate(rows: torch.Tensor, value: Value, alpha: float) -> torch.Tensor:
    return rows * (1 - alpha) + value * alpha


def _preserve(rows: torch.Tensor, value: torch.Tensor, coefficient: float) -> torch.Tensor:
    moved = rows + value * coefficient
    length = moved.norm(dim=-1, keepdim=True)
    return torch.where(length > 0, moved * (rows.norm(dim=-1, keepdim=True) / length), moved)


def _match(rows: torch.Tensor, value: torch.Tensor, coefficient: float) -> torch.Tensor:
    return rows + rows.norm(dim=-1, keepdim=True) * (value * coefficient)


def _project_out(rows: torch.Tensor, value: torch.Tensor, coefficient: float) -> torch.Tensor:
    return rows - (rows @ value.T) @ value * coefficient


def _clamp(rows: torch.Tensor, value: torch.Tensor, min: float | None, max: float | None) -> torch.Tensor:
    component = rows @ value
    return rows + (component.clamp(min, max) - component)[:, None] * value


OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "zero": _zero,
    "scale": _scale,
    "add": _add,
    "set": _set,
    "interpolate": _interpolate,
    "preserve": _preserve,
    "match": _match,
    "project_out": _project_out,
    "clamp": _clamp,
}
_UNIT = ("match", "project_out", "clamp")
"""What takes directions, whose length does not count."""


def from_document(document: Mapping[str, Any], load: Callable[[str], torch.Tensor], width: int) -> Edit:
    """Edit of an intervention document (`lenspool.edit_forms`).

    Parameters
    ----------
    load
        Gives the tensor of an array's digest.
    width
        Of the hook's rows.

    Raises
    ------
    ValueError
        Directions that are zero or not independent.
    """
    op = document.get("norm", document["op"])
    numbers = {k: v for k, v in document.items() if k in ("factor", "coefficient", "alpha", "min", "max")}
    value: Value = 0.0
    rows = columns = None
    device = torch.device("cpu")
    given = document.get("value", 0.0)
    if isinstance(given, dict):
        value = load(given["array"])
        device = value.device
        if "rows" in given:
            rows = torch.tensor(rg.positions(given["rows"]), device=device)
    elif "value" in document:
        value = float(given)
    if "columns" in document:
        columns = torch.tensor(rg.positions(document["columns"]), device=device)
    if isinstance(value, torch.Tensor):
        many = rows is not None or (op == "project_out" and value.dim() > 1)
        value = value.reshape(len(value), -1) if many else value.flatten()
        if columns is not None and value.shape[-1] == width != len(columns):
            value = value[..., columns]
        if op in _UNIT:
            value = _orthonormal(value)
    ranges = [(start, stop) for start, stop in document["ranges"]]
    tokens = frozenset(document["tokens"]) if "tokens" in document else None
    return Edit(op, ranges, numbers, value, rows, columns, tokens)


def _orthonormal(directions: torch.Tensor) -> torch.Tensor:
    """Orthonormal rows `[k, width]` with the same span, or the unit vector of one direction, by QR in float64."""
    exact = directions.double()
    if exact.dim() == 1:
        length = exact.norm()
        if not length > 0:
            raise ValueError("the direction is zero")
        return (exact / length).float()
    basis, triangle = torch.linalg.qr(exact.T)
    pivots = triangle.diagonal().abs()
    if not pivots.min() > 1e-6 * pivots.max():
        raise ValueError("the directions are zero or not independent")
    return basis.T.float().contiguous()
