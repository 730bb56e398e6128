"""What each head adds to the attention output, computed from z."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class HeadResults:
    """Each head's part of z through the output projection, without bias.

    Attributes
    ----------
    projection
        vLLM's linear layer. It is applied to z with all other heads at zero: its weights may be in a packed form. Its
        kernels on CPU keep state, so this must run in the thread that runs the model.
    """

    heads: int
    projection: Any

    def rows(self, z: torch.Tensor) -> torch.Tensor:
        """`[n, head * d_model]` of z rows `[n, head * d_head]`."""
        per_head = z.view(len(z), self.heads, -1)
        parts = []
        for head in range(self.heads):
            alone = torch.zeros_like(per_head)
            alone[:, head] = per_head[:, head]
            # not called as a module, which would run its taps
            parts.append(self.projection.quant_method.apply(self.projection, alone.flatten(1), None))
        return torch.stack(parts, 1).flatten(1)
