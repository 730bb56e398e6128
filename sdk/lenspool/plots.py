"""Pictures of a capture, by matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lenspool import entries
from lenspool import hooks as hk
from lenspool.errors import InvalidJob
from lenspool.extras import literal, needed
from lenspool.layout import label, layout, per_position, with_rows

if TYPE_CHECKING:
    from lenspool.result import Capture


class Plots:
    """What `Capture.plot` gives; each method draws on `ax`, or a new figure, and returns the axes.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """

    def __init__(self, capture: Capture, strings: Callable[[Sequence[int]], list[str]] | None) -> None:
        self._capture = capture
        self._strings = strings

    def norms(self, hooks: str | Iterable[str] | None = None, ax: Any = None) -> Any:
        """L2 norm of each row: hooks against tokens, on a logarithmic scale.

        Parameters
        ----------
        hooks
            Names or patterns; default all that were captured, but attention patterns and scores, and `norm` readouts.
        """
        capture = self._capture
        names = [n for n in with_rows(capture) if "|" not in n or entries.parse(n).op == "norm"]
        if hooks is None:
            names = [n for n in names if "key" not in layout(capture, n).dims]
        else:
            wanted = set(hk.resolve(hooks, capture.card))
            names = [n for n in names if n.partition("|")[0] in wanted]
        if not names:
            raise InvalidJob("hooks", "none of them was captured", "hooks, or the readout norm")
        values = np.stack([per_position(capture, n) for n in names])
        ax = _axes(ax, values.shape)
        image = ax.imshow(
            np.where(values > 0, values, np.nan), norm="log", cmap="viridis", aspect="auto", interpolation="nearest"
        )
        self._ticks(ax, capture.positions, [n.partition("|")[0] for n in names])
        ax.figure.colorbar(image, ax=ax, label="L2 norm")
        ax.set(title="norm of each row", xlabel="token", ylabel="hook")
        return ax

    def logit_lens(self, ax: Any = None) -> Any:
        """The likeliest next token of each layer and position, from `lens(hook, k=...)` readouts; colour is its logit.

        The last layer is at the top. Next tokens are written as ids where the model has no tokenizer.
        """
        capture = self._capture
        found = [n for n in capture if "|lens.top_k(" in n]
        names = list({entries.parse(n).hook: n for n in found}.values())[::-1]
        if not names:
            raise InvalidJob("hooks", "no logit lens was captured", 'lenspool.readouts.lens("resid_post.*", k=1)')
        best = np.stack([capture[n].indices[:, 0] for n in names])
        logits = np.stack([capture[n].values[:, 0] for n in names])
        ax = _axes(ax, best.shape, wide=True)
        image = ax.imshow(logits, cmap="viridis", aspect="auto", interpolation="nearest")
        middle = (logits.min() + logits.max()) / 2
        for (row, column), token in np.ndenumerate(best):
            text = str(token) if self._strings is None else repr(self._strings([int(token)])[0])[1:-1]
            colour = "white" if logits[row, column] < middle else "black"
            ax.text(column, row, literal(text[:12]), ha="center", va="center", fontsize=6, color=colour)
        self._ticks(ax, capture.positions, [entries.parse(n).hook for n in names])
        ax.figure.colorbar(image, ax=ax, label="logit")
        ax.set(title="logit lens: likeliest next token", xlabel="token", ylabel="stream")
        return ax

    def attention(self, layer: int, head: int, ax: Any = None) -> Any:
        """The pattern of one head, queries against keys; needs `blocks.{layer}.attn.hook_pattern`.

        Negative layers and heads count from the end.
        """
        capture = self._capture
        name = hk.resolve(f"pattern.{layer}", capture.card, "layer")[0]
        pattern = capture.numpy(name)
        if not -len(pattern) <= head < len(pattern):
            raise InvalidJob("head", f"got {head}", f"{-len(pattern)}..{len(pattern) - 1}")
        ax = _axes(ax, pattern.shape[1:])
        image = ax.imshow(pattern[head], cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        queries = [label(capture, int(p)) for p in capture.positions]
        self._ticks(ax, np.arange(pattern.shape[2]), queries)
        ax.figure.colorbar(image, ax=ax, label="attention")
        ax.set(title=f"{name}, head {head % len(pattern)}", xlabel="key", ylabel="query")
        return ax

    def _ticks(self, ax: Any, columns: np.ndarray, rows: list[str]) -> None:
        labels = [literal(label(self._capture, int(p))) for p in columns]
        every = max(1, len(labels) // 100), max(1, len(rows) // 100)
        ax.set_xticks(range(0, len(labels), every[0]), labels[:: every[0]], rotation=90, fontsize=7)
        ax.set_yticks(range(0, len(rows), every[1]), [literal(r) for r in rows[:: every[1]]], fontsize=7)


def _axes(ax: Any, shape: Sequence[int], *, wide: bool = False) -> Any:
    """The axes given, or those of a new figure that is as large as so many rows and columns need."""
    if ax is not None:
        return ax
    width = min(max(3.5 + (0.7 if wide else 0.3) * shape[1], 4.5), 40)
    return needed("matplotlib.pyplot").subplots(
        figsize=(width, min(max(2 + 0.2 * shape[0], 3), 30)), layout="constrained"
    )[1]
