"""What an edit takes: numbers and arrays, as the canonical `value` of its document."""

from __future__ import annotations

import itertools
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lenspool.card import HookInfo
from lenspool.edit_places import Columns, Selection
from lenspool.errors import InvalidJob
from lenspool.interventions import ArrayRef, as_float32, as_number
from lenspool.result import Capture
from lenspool_cache.keys import array_digest

Value = float | dict[str, Any]


class Values:
    """Writes the `value` of edits at one hook, and collects their arrays.

    Parameters
    ----------
    arrays
        Digest -> array; what is given by value is added.
    at
        How errors call the intervention.
    """

    def __init__(self, hook: HookInfo, selection: Selection, arrays: dict[str, np.ndarray], at: str) -> None:
        self._hook = hook
        self._selection = selection
        self._arrays = arrays
        self._field = f"{at}.value"
        self._dims = hook.dims or (hook.width,)

    @staticmethod
    def length(value: Any, width: int, field: str) -> float:
        """Norm of a vector, in any shape that has `width` numbers, or mean norm of rows, given by value.

        Raises
        ------
        InvalidJob
            It is a number, a reference, or zero.
        """
        if isinstance(value, ArrayRef) or _is_number(value):
            raise InvalidJob(field, "the length of the value is not known", "an array given by value, not a reference")
        array = as_float32(value, field).astype(np.float64)
        if array.size % width == 0:  # else it is refused, with the shapes that fit, where the value is written
            array = array.reshape(-1, width)
        length = float(np.linalg.norm(array.reshape(-1, array.shape[-1]), axis=1).mean())
        if length == 0:
            raise InvalidJob(field, "the vector is zero", "a vector with a direction")
        return length

    def any(self, value: Any, columns: Columns | None) -> Value:
        """A number, one row, or one row per position."""
        if not isinstance(value, ArrayRef) and _is_number(value):
            return as_number(value.item() if hasattr(value, "item") else value, self._field)
        order = self._selection.order
        shapes = self._shapes(columns)
        many: dict[tuple[int, ...], tuple[int, ...]] = {}
        if order is not None:  # [positions, d_head] would be taken for a row per head
            many = {(len(order), *s): s for s in shapes if columns is None or s != (columns.head_size,)}
        array = None if isinstance(value, ArrayRef) else as_float32(value, self._field)
        shape = value.shape if array is None else array.shape
        if shape in shapes:
            if array is None:
                return self._reference(value, shape, columns)
            return self._keep(self._narrow(array.reshape(-1), shape, columns))
        if shape not in many:
            raise self._misfit(shape, [*shapes, *many])
        rows = self._rows_of(order or [])
        if array is None:
            return {**self._reference(value, many[shape], columns), "rows": _runs(rows)}
        return self._keep_rows(self._narrow(array[rows].reshape(len(rows), -1), many[shape], columns))

    def rows(self, value: Any, directions: bool, columns: Columns | None, *, length: bool) -> Value:
        """One row, or `[k, width]` directions."""
        width = self._hook.width if columns is None else len(columns.order)
        array, shape = self._array(value)
        single = shape == (width,) or (columns is None and shape == self._dims)
        if not single and not (directions and len(shape) == 2 and shape[1] == width and 1 <= shape[0] <= width):
            raise self._misfit(shape, [(width,), *([("k", width)] if directions else [])])
        if array is None:
            if columns is not None and columns.order != sorted(columns.order):
                raise InvalidJob(self._field, "a reference whose numbers would have to be put in order", "ascending")
            return {"array": value.digest}
        array = array.reshape(-1, width)
        if columns is not None:
            array = array[:, np.argsort(columns.order)]
        return self._keep(self._directed(array, directions, length=length))

    def per_head(
        self, value: Any, directions: bool, columns: Columns, *, length: bool
    ) -> list[tuple[list[int], Value]]:
        """Columns and value for each head; a vector or directions for all of them, or a vector for each."""
        size = columns.head_size or 0
        array, shape = self._array(value)
        each = not directions and shape == (len(columns.order), size) and len(columns.order) > 1
        common = shape == (size,) or (directions and len(shape) == 2 and shape[1] == size and 1 <= shape[0] <= size)
        common = common or (shape == (1, size) and len(columns.order) == 1)
        if not each and not common:
            lead = ("k", size) if directions else (len(columns.order), size)
            raise self._misfit(shape, [(size,), lead])
        out: list[tuple[list[int], Value]] = []
        for i, head in enumerate(columns.order):
            part = [head * size, (head + 1) * size]
            if array is None:
                if each:
                    raise InvalidJob(self._field, "is a reference of another form", f"a reference to [{size}] numbers")
                out.append((part, {"array": value.digest}))
            else:
                own = array[i : i + 1] if each else array.reshape(-1, size)
                out.append((part, self._keep(self._directed(own, directions, length=length))))
        return sorted(out, key=lambda pair: pair[0])

    def patch(self, source: Any, source_positions: Any, columns: Columns | None) -> Value:
        """Rows of a capture or an array, one for each position."""
        order = self._selection.order
        if order is None:
            raise InvalidJob(self._field, "positions reach to the end of the generation", "positions of the prompt")
        rows = self._rows_of(order)
        if isinstance(source, Capture):
            try:
                captured = as_float32(np.asarray(source[self._hook.name]).astype(np.float32), self._field)
            except KeyError as error:
                raise InvalidJob(self._field, str(error.args[0]), "a capture that has the hook") from None
            array = captured.reshape(len(captured), -1)
            there = {int(p): k for k, p in enumerate(source.positions)}
            asked = order
            if source_positions is not None:
                count = len(source.prompt_token_ids)
                asked = _sources(source_positions, count, f"{self._field}.source_positions")
            if missing := [p for p in asked if p not in there]:
                raise InvalidJob(self._field, f"the capture has no rows at {missing[:8]}", f"{sorted(there)[:8]}...")
            picked = [there[p] for p in asked]
            shape: tuple[int, ...] = array.shape
        else:
            given, shape = self._array(source)
            if shape in self._shapes(columns):
                return self.any(source, columns)
            picked = list(range(shape[0] if shape else 0))
            if source_positions is not None:
                picked = _sources(source_positions, len(picked), f"{self._field}.source_positions")
            if given is None:
                if tuple(shape[1:]) not in ((self._hook.width,), self._dims):
                    raise self._misfit(shape, [("rows", self._hook.width)])
                chosen = self._pick(picked, order, rows)
                return {"array": source.digest, "rows": _runs(chosen)}
            array = given
        if tuple(shape[1:]) not in self._shapes(columns):
            raise self._misfit(shape, [("rows", *s) for s in self._shapes(columns)])
        chosen = self._pick(picked, order, rows)
        taken = array[chosen].reshape(len(chosen), -1)
        return self._keep_rows(self._narrow(taken, tuple(shape[1:]), columns))

    def _pick(self, picked: list[int], order: list[int], rows: list[int]) -> list[int]:
        if len(picked) != len(order):
            raise InvalidJob(self._field, f"has {len(picked)} rows for {len(order)} positions", "one for each position")
        return [picked[row] for row in rows]

    def _array(self, value: Any) -> tuple[np.ndarray | None, tuple[int, ...]]:
        if isinstance(value, ArrayRef):
            return None, tuple(value.shape)
        if _is_number(value):
            raise InvalidJob(self._field, f"got {value!r}", "an array, as numpy, torch or lists, or an ArrayRef")
        array = as_float32(value, self._field)
        return array, array.shape

    def _shapes(self, columns: Columns | None) -> list[tuple[int, ...]]:
        """Shapes that one row may be given in: only the columns, or all of the row."""
        whole = [(self._hook.width,), self._dims]
        if columns is None:
            return list(dict.fromkeys(whole))
        if columns.head_size is None:
            return list(dict.fromkeys([(len(columns.order),), *whole]))
        parts = [(columns.head_size,), (len(columns.order), columns.head_size)]
        return list(dict.fromkeys([*parts, *whole]))

    def _narrow(self, array: np.ndarray, shape: tuple[int, ...], columns: Columns | None) -> np.ndarray:
        """Rows `[..., numbers]` that were given in a shape, as the columns in ascending order."""
        if columns is None:
            return array
        count, size = len(columns.order), columns.head_size
        if shape == (count,) if size is None else shape == (count, size):
            return array[..., np.argsort(columns.indices)]
        if shape == (size,):
            return np.concatenate([array] * count, axis=-1)
        return array[..., np.sort(columns.indices)]

    def _reference(self, ref: ArrayRef, shape: tuple[int, ...], columns: Columns | None) -> dict[str, Any]:
        """A reference, whose numbers cannot be put in another order here."""
        if columns is not None and shape not in ((self._hook.width,), self._dims):
            repeated = shape == (columns.head_size,) and len(columns.order) > 1
            if repeated or columns.order != sorted(columns.order):
                allowed = f"a reference to all {self._hook.width} numbers, or heads and units in ascending order"
                raise InvalidJob(self._field, "a reference whose numbers would have to be put in order", allowed)
        return {"array": ref.digest}

    def _rows_of(self, order: list[int]) -> list[int]:
        """For each position of the selection its place in the order given."""
        places = {position: place for place, position in enumerate(order)}
        if len(places) < len(order):
            raise InvalidJob(self._field, "a row for each position, but a position is named twice", "each only once")
        if self._selection.tokens is not None:
            raise InvalidJob(self._field, "a row for each position together with where_token", "one row")
        return [places[p] for start, stop in self._selection.ranges for p in range(start, stop or 0)]

    def _directed(self, array: np.ndarray, directions: bool, *, length: bool) -> np.ndarray:
        if directions:
            if np.linalg.matrix_rank(array.astype(np.float64)) < len(array):
                raise InvalidJob(self._field, "the directions are zero or not independent", "independent directions")
            return array
        if length and not array.any():
            raise InvalidJob(self._field, "the vector is zero", "a vector with a direction")
        return array.reshape(-1)

    def _keep_rows(self, rows: np.ndarray) -> Value:
        if len(rows) == 1:
            return self._keep(rows[0])
        return {**self._keep(rows), "rows": [[0, len(rows)]]}

    def _keep(self, array: np.ndarray) -> dict[str, Any]:
        array = np.ascontiguousarray(array)
        digest = array_digest(array)
        self._arrays[digest] = array
        return {"array": digest}

    def _misfit(self, shape: Sequence[int], shapes: Iterable[Sequence[Any]]) -> InvalidJob:
        expected = " or ".join(f"({', '.join(map(str, s))}{',' if len(s) == 1 else ''})" for s in shapes)
        return InvalidJob(self._field, f"has shape {tuple(shape)}", f"shape {expected}, as {self._hook.name} has")


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (numbers.Real, np.bool_, str)) or getattr(value, "ndim", None) == 0


def _sources(positions: Any, count: int, field: str) -> list[int]:
    """Rows of a source: ints (negative: from its end) or a slice; repeats are allowed."""
    if isinstance(positions, slice):
        return list(range(count))[positions]
    out = []
    for item in positions if isinstance(positions, Iterable) else [positions]:
        try:
            row = operator.index(item)
        except TypeError:
            raise InvalidJob(field, f"got {item!r}", "ints, or a slice") from None
        if not -count <= row < count:
            raise InvalidJob(field, f"got {row}", f"{-count}..{count - 1}")
        out.append(row % count)
    return out


def _runs(rows: Sequence[int]) -> list[list[int]]:
    """Rows as `[start, stop)` runs, in their order: `[5, 6, 3] -> [[5, 7], [3, 4]]`."""
    groups = itertools.groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0])
    return [[run[0][1], run[-1][1] + 1] for run in (list(g) for _, g in groups)]
