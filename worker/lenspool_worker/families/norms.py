"""Scale and normalized value of a norm, computed from the stream that it reads.

vLLM's norms are fused with the addition in front of them and with their weights, so neither is a tensor of the model.
Definitions are TransformerLens's: RMSNorm divides by `sqrt(mean(x^2) + eps)` (Zhang & Sennrich 2019, "Root Mean Square
Layer Normalization"), LayerNorm subtracts the mean first (Ba et al. 2016, "Layer Normalization"). In float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Norm:
    """A norm's definition: whether it subtracts the mean, and its epsilon."""

    centred: bool
    epsilon: float

    def scale(self, rows: torch.Tensor) -> torch.Tensor:
        """`[n, 1]` float32 of stream rows `[n, d_model]`."""
        rows = self._centre(rows.float())
        return rows.square().mean(-1, keepdim=True).add(self.epsilon).sqrt()

    def normalized(self, rows: torch.Tensor) -> torch.Tensor:
        """`[n, d_model]` in the dtype of the stream rows."""
        exact = rows.float()
        return (self._centre(exact) / self.scale(rows)).to(rows.dtype)

    def _centre(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(-1, keepdim=True) if self.centred else rows


def norm_of(module: nn.Module) -> Norm | None:
    """The definition of a norm module; None when its class does not tell."""
    kind = type(module).__name__
    epsilon = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if epsilon is None or not ("RMSNorm" in kind or "LayerNorm" in kind):
        return None
    return Norm(centred="RMSNorm" not in kind, epsilon=float(epsilon))
