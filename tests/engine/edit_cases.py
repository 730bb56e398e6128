"""Every op of the interventions, as a document for the engine and as plain torch for the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lenspool_cache import Store
from lenspool_cache.ranges import OpenRange
from tests.engine.asking import Rows, worst
from tests.engine.oracle import Edit, Oracle

Function = Callable[[torch.Tensor], torch.Tensor]
Case = tuple[dict[str, Any], Edit]
"""An intervention document, and what the oracle does for it."""


class Cases:
    """Makes cases with random vectors, whose numbers are about as large as `scale`."""

    def __init__(self, store: Store, seed: int) -> None:
        self._store = store
        self._random = np.random.default_rng(seed)

    def make(self, op: str, hook: str, width: int, scale: float, ranges: Sequence[OpenRange]) -> Case:
        """A case of an op, one of `OPS`; a row per position needs one closed range."""
        fields, function = getattr(self, op)(width, scale, ranges)
        name = op.split("_")[0] if op != "project_out" else op
        name = {"preserve": "steer", "match": "steer", "units": "scale", "heads": "set", "rows": "set"}.get(name, name)
        document = {"hook": hook, "op": name, "ranges": [list(r) for r in ranges], **fields}
        return document, (hook, function, ranges)

    def _array(self, shape: Sequence[int], scale: float) -> tuple[dict[str, str], torch.Tensor]:
        values = self._random.normal(0, scale, tuple(shape)).astype(np.float32)
        return {"array": self._store.put_array(values)}, torch.from_numpy(values)

    def zero(self, width: int, scale: float, ranges: Any) -> tuple[dict[str, Any], Function]:
        return {}, lambda x: 0 * x

    def scale(self, width: int, scale: float, ranges: Any) -> tuple[dict[str, Any], Function]:
        return {"factor": -1.75}, lambda x: -1.75 * x

    def add(self, width: int, scale: float, ranges: Any) -> tuple[dict[str, Any], Function]:
        value, v = self._array([width], scale)
        return {"value": value, "coefficient": 0.5}, lambda x: x + 0.5 * v

    def add_number(self, width: int, scale: float, ranges: Any) -> tuple[dict[str, Any], Function]:
        return {"value": 0.125, "coefficient": -2.0}, lambda x: x - 0.25

    def set(self, width: int, scale: float, ranges: Any) -> tuple[dict[str, Any], Function]:
        value, v = self._array([width], scale)
        return {"value": value}, lambda x: v.to(x).expand_as(x)

    def set_number(self, width: int, scale: float, ranges: Any) -> tuple[dict[str, Any], Function]:
        return {"value": 0.375}, lambda x: torch.full_like(x, 0.375)

    def rows(self, width: int, scale: float, ranges: Any) -> tuple[dict[str, Any], Function]:
        """A patch: positions take rows of a longer array, in another order."""
        ((start, stop),) = ranges
        count = stop - start
        value, rows = self._array([count + 3, width], scale)
        wanted = [[count, count + 1], [0, count - 1]] if count > 1 else [[2, 3]]
        order = [r for a, b in wanted for r in range(a, b)]
        return {"value": {**value, "rows": wanted}}, lambda x: rows[order].to(x)

    def heads(self, width: int, scale: float, ranges: Any) -> tuple[dict[str, Any], Function]:
        """One part of the row is set, to its part of a whole row."""
        value, v = self._array([width], scale)
        part = [width // 4, width // 4 + width // 8]

        def function(x: torch.Tensor) -> torch.Tensor:
            x[:, part[0] : part[1]] = v[part[0] : part[1]].to(x)
            return x

        return {"value": value, "columns": [part]}, function

    def units(self, width: int, scale: float, ranges: Any) -> tuple[dict[str, Any], Function]:
        """Single numbers of the row are scaled."""

        def function(x: torch.Tensor) -> torch.Tensor:
            x[:, [3, 4, width - 1]] *= 2.5
            return x

        return {"factor": 2.5, "columns": [[3, 5], [width - 1, width]]}, function

    def interpolate(self, width: int, scale: float, ranges: Any) -> tuple[dict[str, Any], Function]:
        value, v = self._array([width], scale)
        return {"value": value, "alpha": 0.3}, lambda x: 0.7 * x + 0.3 * v

    def preserve(self, width: int, scale: float, ranges: Any) -> tuple[dict[str, Any], Function]:
        value, v = self._array([width], scale)

        def function(x: torch.Tensor) -> torch.Tensor:
            moved = x + 2 * v
            return moved * x.norm(dim=-1, keepdim=True) / moved.norm(dim=-1, keepdim=True)

        return {"norm": "preserve", "value": value, "coefficient": 2.0}, function

    def match(self, width: int, scale: float, ranges: Any) -> tuple[dict[str, Any], Function]:
        value, v = self._array([width], 1.0)
        unit = v.double() / v.double().norm()
        fields = {"norm": "match", "value": value, "coefficient": 0.5}
        return fields, lambda x: x + 0.5 * unit.to(x) * x.norm(dim=-1, keepdim=True)

    def project_out(self, width: int, scale: float, ranges: Any) -> tuple[dict[str, Any], Function]:
        """Four directions: x - D^+ D x with the pseudo-inverse, another way than by QR."""
        value, d = self._array([4, width], 1.0)
        projector = torch.linalg.pinv(d.double()) @ d.double()
        return {"value": value, "coefficient": 1.0}, lambda x: x - (x.double() @ projector).to(x)

    def clamp(self, width: int, scale: float, ranges: Any) -> tuple[dict[str, Any], Function]:
        value, v = self._array([width], 1.0)
        unit = v.double() / v.double().norm()

        def function(x: torch.Tensor) -> torch.Tensor:
            component = x.double() @ unit
            return (x.double() + (component.clamp(-scale / 2, scale / 3) - component)[:, None] * unit).to(x)

        return {"value": value, "min": -scale / 2, "max": scale / 3}, function


OPS = [name for name in vars(Cases) if not name.startswith("_") and name != "make"]


def closed(op: str, ranges: Sequence[OpenRange], length: int) -> list[OpenRange]:
    """What a row per position can do with ranges: one, with an end."""
    if op != "rows":
        return list(ranges)
    start, stop = ranges[0]
    return [(min(start, length - 1), length if stop is None else stop)]


def check(
    prompt: list[int], tokens: list[int], rows: Rows, edits: Sequence[Edit], exact: Oracle, tolerance: float = 1e-5
) -> float:
    """Rows and tokens of a generation are what the oracle has in float64; the largest relative error."""
    truth = exact.run([*prompt, *tokens[:-1]], edits)
    logits = truth["unembed.hook_out"][len(prompt) - 1 :]
    # a stream that was set to zero has equal logits, of which any is the greatest
    assert all(line[token] >= line.max() - 1e-4 for line, token in zip(logits, tokens, strict=True))
    error, hook = worst(rows, truth)
    assert error <= tolerance, f"{hook} is off by {error:.1e}"
    return error
