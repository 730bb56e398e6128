"""Captures of several prompts as one array per hook, with a mask that says which rows are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lenspool.errors import InvalidJob
from lenspool.layout import layout
from lenspool.readouts import Readout
from lenspool.result import Capture


class Stack(Mapping[str, Any]):
    """Arrays `[prompts, ...]` by hook name, made at each access; as a capture's are, with the prompts in front.

    Where prompts have rows of different number, each begins at index 0 and what is behind its end is NaN (-1 in
    integers), so that a mean that forgets the mask is not a wrong number. `mask` says what is there.

    Attributes
    ----------
    captures
        What was stacked.
    positions
        int64 `[prompts, rows]` absolute position of each row; -1 where there is none.
    mask
        bool `[prompts, rows]`: whether there is a row.
    """

    def __init__(self, captures: Sequence[Capture]) -> None:
        self.captures = list(captures)
        self.positions = _padded([c.positions for c in self.captures])
        self.mask = self.positions >= 0

    def mask_of(self, name: str | Readout) -> np.ndarray:
        """Mask of one hook or readout, bool `[prompts, rows]`: a loss has a row less than `mask` tells.

        Raises
        ------
        InvalidJob
            It is a reduction, which has no rows.
        """
        found = [layout(capture, name) for capture in self.captures]
        if any(one.positions is None for one in found):
            raise InvalidJob("name", f"{found[0].name} has no rows", "a hook, or a readout with rows")
        return _padded([one.positions for one in found if one.positions is not None]) >= 0

    def __getitem__(self, name: str | Readout) -> Any:
        values = [capture[name] for capture in self.captures]
        if isinstance(values[0], np.ndarray):
            return _padded(values)
        kind = type(values[0])
        return kind(**{part: _padded([getattr(v, part) for v in values]) for part in vars(values[0])})

    def __iter__(self) -> Iterator[str]:
        return iter(self.captures[0])

    def __len__(self) -> int:
        return len(self.captures[0])

    def __contains__(self, name: object) -> bool:
        return name in self.captures[0]

    def __repr__(self) -> str:
        ragged = "" if self.mask.all() else f", {int((~self.mask).sum())} of them masked"
        prompts, rows = self.mask.shape
        return f"<Stack {len(self)} hooks x {prompts} prompts x {rows} rows{ragged}>"


def stack(captures: Iterable[Capture]) -> Stack:
    """Put captures of several prompts together; see `Stack`.

    Raises
    ------
    InvalidJob
        There is none, or they differ in model or hooks.
    """
    items = list(captures)
    for i, item in enumerate(items):
        if not isinstance(item, Capture):
            raise InvalidJob(f"captures[{i}]", f"got {type(item).__name__}", "captures")
        if item.card.id != items[0].card.id:
            raise InvalidJob(f"captures[{i}]", f"is of {item.card.id}", items[0].card.id)
        if set(item) != set(items[0]):
            raise InvalidJob(f"captures[{i}]", f"has other hooks: {', '.join(item)}", ", ".join(items[0]))
    if not items:
        raise InvalidJob("captures", "is empty", "at least one capture")
    return Stack(items)


def _padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """`[arrays, ...]`, each dimension as long as in the largest array; NaN or -1 behind the end of the others."""
    shape = tuple(max(sizes) for sizes in zip(*(a.shape for a in arrays), strict=True))
    dtype = arrays[0].dtype
    out = np.full((len(arrays), *shape), -1 if dtype.kind in "iu" else np.nan, dtype)
    for i, array in enumerate(arrays):
        out[i][tuple(slice(size) for size in array.shape)] = array
    return out
