"""What recipes return: an array whose axes have names and labels, and its picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lenspool.extras import literal, needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False, repr=False)
class HeatMap:
    """Numbers over two named axes.

    Attributes
    ----------
    values
        float64 `[first axis, second axis]`.
    axes
        Name of each axis, in the array's order -> labels.
    metric
        What was measured.
    runs, computed
        How many runs it is made of, and how many of them were not in the store.
    """

    values: np.ndarray
    axes: dict[str, list[str]]
    metric: str
    runs: int
    computed: int

    quantity = "value"
    """What the values are, for the picture."""

    def top(self, n: int = 5) -> list[tuple[str, str, float]]:
        """The n cells farthest from 0, as labels and value."""
        rows, columns = self.axes.values()
        order = np.argsort(-np.abs(np.nan_to_num(self.values)), axis=None, kind="stable")[:n]
        places = [np.unravel_index(place, self.values.shape) for place in order]
        return [(rows[i], columns[j], float(self.values[i, j])) for i, j in places]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the heat map, 0 in white.

        Parameters
        ----------
        ax
            Where; default a new figure.

        Raises
        ------
        ImportError
            matplotlib is not installed.
        """
        rows, columns = self.axes.values()
        if ax is None:
            size = (max(2.5 + 0.35 * len(columns), 4), max(1.5 + 0.2 * len(rows), 3))
            ax = needed("matplotlib.pyplot").subplots(figsize=size, layout="constrained")[1]
        known = np.abs(self.values[np.isfinite(self.values)])
        bound = float(known.max()) if known.size and known.max() > 0 else 1.0
        image = ax.imshow(self.values, cmap="RdBu", vmin=-bound, vmax=bound, aspect="auto", interpolation="nearest")
        ax.set_xticks(range(len(columns)), [literal(c) for c in columns], rotation=90, fontsize=8)
        ax.set_yticks(range(len(rows)), [literal(r) for r in rows], fontsize=7)
        names = list(self.axes)
        ax.set(ylabel=names[0], xlabel=names[1], title=self._title())
        ax.figure.colorbar(image, ax=ax, label=self.quantity)
        return ax

    def _title(self) -> str:
        return literal(self.metric)

    def _facts(self) -> str:
        """What a subclass says of itself in its repr."""
        return ""

    def __repr__(self) -> str:
        shape = " x ".join(f"{len(labels)} {name}" for name, labels in self.axes.items())
        row, column, value = self.top(1)[0]
        facts = f"{self._facts()}; " if self._facts() else ""
        largest = f"largest {value:.3g} at {row}, {column}"
        return (
            f"<{type(self).__name__} {shape}, {self.metric}: {facts}{largest}; "
            f"{self.runs} runs, {self.computed} computed>"
        )


def position_labels(tokens: list[str] | None, positions: list[int]) -> list[str]:
    """Labels of positions: place and token."""
    return [str(p) if tokens is None else f"{p} {tokens[p]!r}" for p in positions]
