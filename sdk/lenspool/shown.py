"""How results show themselves: text for a terminal, HTML with coloured tokens for a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lenspool import entries
from lenspool.errors import InvalidJob
from lenspool.hooks import template
from lenspool.layout import DIMENSIONS, label, layout, per_position, with_rows
from lenspool.readouts import Readout

if TYPE_CHECKING:
    from lenspool.result import Capture

_LINE = 110
_MOST_TOKENS = 2000
_MOST_LINES = 12


def summary(capture: Capture) -> str:
    """A few lines that open no array: where from, which tokens, which hooks in what shape."""
    source = "cached" if capture.cached else "computed"
    kind = type(capture).__name__
    lines = [f"<{kind} of {capture.card.name}: {len(capture)} hooks x {len(capture.positions)} positions, {source}"]
    lines.append(f"  tokens  {_cut([label(capture, p) for p in range(len(capture.sequence))])}")
    text = getattr(capture, "text", None)
    if text is not None:
        lines.append(f"  text    {_cut([repr(text)])}")
    shapes = _shapes(capture)
    lines += [f"  {name}  {shape}" for name, shape in shapes[:_MOST_LINES]]
    if len(shapes) > _MOST_LINES:
        lines.append(f"  and {len(shapes) - _MOST_LINES} more")
    return "\n".join(lines) + ">"


def _cut(words: Sequence[str]) -> str:
    line = " ".join(words[:_LINE])
    return line if len(line) <= _LINE and len(words) <= _LINE else line[: _LINE - 4] + " ..."


def _shapes(capture: Capture) -> list[tuple[str, str]]:
    """Hooks with the names and sizes of their dimensions; those that differ in the layer only as one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in capture:
        groups.setdefault((template(name), _shape(capture, name)), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{form.replace('{layer}', '*')} ({len(names)})", shape)
        for (form, shape), names in groups.items()
    ]


def _shape(capture: Capture, name: str) -> str:
    """`token 6 x d_model 576`, from the card."""
    if entries.is_readout(name):
        entry = entries.parse(name)
        info = entries.info(entry.stored[0], capture.card)
    else:
        info = capture.card.hooks[name]
    dims = [DIMENSIONS.get(dim, dim) for dim in info.shape]
    inner = [str(size) if size else "up to here" for size in info.dims or ((info.width,) if len(dims) > 1 else ())]
    if "key" in dims:
        inner = [str(info.dims[0]), str(len(capture.sequence))]
    positions = layout(capture, name).positions
    rows = {} if positions is None else {"token": str(len(positions))}
    sizes = iter(inner)
    return " x ".join(f"{dim} {rows[dim] if dim in rows else next(sizes, '')}".strip() for dim in dims) or "one number"


@dataclass(frozen=True, repr=False)
class Highlight:
    """Tokens and a number for each, shown by notebooks as coloured text.

    Attributes
    ----------
    tokens
        Text of each token.
    values
        float64 `[tokens]`; NaN where there is none.
    title
        What the numbers are.
    """

    tokens: list[str]
    values: np.ndarray
    title: str

    def _repr_html_(self) -> str:
        low, high = _bounds(self.values)
        spans = [
            _span(token, value, place, low, high)
            for place, (token, value) in enumerate(zip(self.tokens[:_MOST_TOKENS], self.values, strict=False))
        ]
        more = len(self.tokens) - len(spans)
        rest = f" &hellip; and {more} more" if more > 0 else ""
        scale = f"{low:.4g} to {high:.4g}" if np.isfinite(self.values).any() else "no values"
        style = "font-family:monospace;white-space:pre-wrap;line-height:1.8"
        return (
            f'<div><div style="font-size:85%;opacity:.7">{html.escape(self.title)}: {scale}</div>'
            f'<div style="{style}">{"".join(spans)}{rest}</div></div>'
        )

    def __repr__(self) -> str:
        return (
            "\n".join(
                [f"<Highlight {self.title}"]
                + [f"  {p:>5} {v:>10.4g}  {t!r}" for p, (t, v) in enumerate(zip(self.tokens, self.values, strict=True))]
            )
            + ">"
        )


def highlight(capture: Capture, by: str | Readout | Any | None = None) -> Highlight:
    """See `Capture.highlight`."""
    tokens = capture.tokens or [f" {i}" for i in capture.sequence]
    values = np.full(len(tokens), np.nan)
    if by is None:
        candidates = with_rows(capture)
        if not candidates:
            return Highlight(tokens, values, "no hook has rows")
        by = candidates[0]
    if isinstance(by, (str, Readout)):
        name = capture.canonical(by)
        found = per_position(capture, name)
        title = name if entries.is_readout(name) and found.ndim == 1 else f"norm of {name}"
        values[capture.positions[: len(found)]] = found
        return Highlight(tokens, values, title)
    array = np.asarray(by, dtype=np.float64)
    if array.shape != (len(capture.positions),):
        raise InvalidJob("by", f"has shape {array.shape}", f"a hook, a readout, or ({len(capture.positions)},) numbers")
    values[capture.positions] = array
    return Highlight(tokens, values, "value")


def html_summary(capture: Capture) -> str:
    """The tokens coloured by the norm at the first hook, and the table of hooks."""
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(shape)}</td></tr>"
        for name, shape in _shapes(capture)
    )
    head = summary(capture).splitlines()[0].lstrip("<")
    return (
        f"<div><b>{html.escape(head)}</b>{highlight(capture)._repr_html_()}"
        f"<details><summary>hooks</summary><table>{rows}</table></details></div>"
    )


def _bounds(values: np.ndarray) -> tuple[float, float]:
    """Range of the colours: that of all positions but the first, an attention sink in many models, if there are more.

    Numbers of both signs get a range that is symmetric, so that 0 is without colour.
    """
    known = values[np.isfinite(values)]
    later = values[1:][np.isfinite(values[1:])]
    chosen = later if len(later) > 1 else known
    if not len(chosen):
        return 0.0, 0.0
    low, high = float(chosen.min()), float(chosen.max())
    if low < 0 < high:
        high = max(-low, high)
        low = -high
    return low, high


def _span(token: str, value: float, place: int, low: float, high: float) -> str:
    text = html.escape(token.replace("\n", "⏎\n"))
    if not np.isfinite(value):
        return f'<span title="{place}">{text}</span>'
    share = (min(max(value, low), high) - low) / (high - low) if high > low else 0.5
    colour = (31, 119, 180)
    if low < 0 < high:
        colour, share = ((214, 39, 40), 1 - 2 * share) if share < 0.5 else (colour, 2 * share - 1)
    style = f"background:rgba({colour[0]},{colour[1]},{colour[2]},{0.7 * share:.3f});border-radius:2px"
    return f'<span title="{place}: {value:.4g}" style="{style}">{text}</span>'
