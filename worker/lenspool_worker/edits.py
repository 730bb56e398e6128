"""The arithmetic of interventions, on rows.

Float32 whatever the model's dtype, cast back once by the caller. `zero` and `set` assign: what was there, NaN or
Infinity included, does not survive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

OPS = ("zero", "scale", "add", "set")


@dataclass(frozen=True)
class Edit:
    """One edit, ready to apply.

    Attributes
    ----------
    op
        `zero`, `scale`, `add` or `set`.
    factor
        What `scale` multiplies by.
    value
        Number, or float32 tensor `[width]` on the engine's device.
    coefficient
        What `add` multiplies its value by.
    """

    op: str
    factor: float = 1.0
    value: float | torch.Tensor = 0.0
    coefficient: float = 1.0

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Edited rows of float32 rows `[n, width]`; the argument is left alone."""
        if self.op == "zero":
            return torch.zeros_like(rows)
        if self.op == "scale":
            return rows * self.factor
        if self.op == "add":
            return rows + self.value * self.coefficient
        if self.op == "set":
            if isinstance(self.value, torch.Tensor):
                return self.value.expand_as(rows).clone()
            return torch.full_like(rows, self.value)
        raise ValueError(f"unknown op {self.op!r}")


def from_document(document: Mapping[str, Any], load: Callable[[str], torch.Tensor]) -> Edit:
    """Edit of an intervention document; `load` gives the tensor of an array's digest."""
    value = document.get("value", 0.0)
    return Edit(
        document["op"],
        factor=document.get("factor", 1.0),
        value=load(value["array"]) if isinstance(value, dict) else value,
        coefficient=document.get("coefficient", 1.0),
    )
