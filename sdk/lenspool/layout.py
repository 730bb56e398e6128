"""What the axes of a result's arrays are: their names, and the position of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lenspool import entries
from lenspool.errors import InvalidJob
from lenspool.readouts import Readout

if TYPE_CHECKING:
    from lenspool.result import Capture

DIMENSIONS = {"pos": "token", "q_pos": "token", "k_pos": "key", "1": "scale"}
"""Names of hooks' dimensions -> names here, where they differ."""


@dataclass(frozen=True)
class Layout:
    """Axes of one hook or readout of a capture.

    Attributes
    ----------
    name
        Canonical name.
    dims
        Name of each axis: `token` (the rows), `key`, `head`, `d_model`, ...
    positions
        `[rows]` absolute position of each row; None where the array has no rows: reductions.
    """

    name: str
    dims: tuple[str, ...]
    positions: np.ndarray | None

    @property
    def axis(self) -> int:
        """Which axis the rows are."""
        return self.dims.index("token")


def layout(capture: Capture, name: str | Readout) -> Layout:
    """Axes of a hook or readout that a capture has.

    Raises
    ------
    KeyError
        It was not captured.
    """
    name = capture.canonical(name)
    if not entries.is_readout(name):
        shape = capture.card.hooks[name].shape
        return Layout(name, _named(shape), capture.positions)
    entry = entries.parse(name)
    info = entries.info(entry.stored[0], capture.card)
    if entry.reduces:
        return Layout(name, _named(info.shape), None)
    positions = capture.positions
    if entry.op == "loss":
        positions = positions[positions < len(capture.prompt_token_ids) - 1]
    return Layout(name, _named(info.shape), positions)


def _named(shape: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(DIMENSIONS.get(dim, dim) for dim in shape)


def with_rows(capture: Capture) -> list[str]:
    """Hooks and readouts that are one array with a row for each position."""
    return [n for n in capture if layout(capture, n).positions is not None and not parts(n)]


def parts(name: str) -> list[str]:
    """Names of the arrays that a readout consists of; none where it is one array."""
    return [p for p in entries.OPS[entries.parse(name).op].parts if p] if entries.is_readout(name) else []


def rows(capture: Capture, name: str | Readout) -> np.ndarray:
    """A hook or readout as float64 `[rows, ...]`, the rows in front.

    Raises
    ------
    InvalidJob
        It has no rows, or several arrays.
    KeyError
        It was not captured.
    """
    found = layout(capture, name)
    if found.positions is None or parts(found.name):
        what = "has no row for each position" if found.positions is None else "is several arrays"
        raise InvalidJob("hooks", f"{found.name} {what}", ", ".join(with_rows(capture)) or "a capture of other hooks")
    return np.moveaxis(np.asarray(capture[found.name]).astype(np.float64), found.axis, 0)


def per_position(capture: Capture, name: str | Readout) -> np.ndarray:
    """One number for each row, float64 `[rows]`: the readout's own, or the L2 norm of the row.

    Raises
    ------
    InvalidJob, KeyError
        As `rows`.
    """
    array = rows(capture, name)
    return array if array.ndim == 1 else np.linalg.norm(array.reshape(len(array), -1), axis=1)


def label(capture: Capture, position: int) -> str:
    """A token as people read it: its text in quotes, or its id where there is no tokenizer."""
    return str(capture.sequence[position]) if capture.tokens is None else repr(capture.tokens[position])
