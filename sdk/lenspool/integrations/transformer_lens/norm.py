"""The end of a model, on the client: its final norm and its unembedding."""

from __future__ import annotations

import numpy as np
import torch


class FinalNorm(torch.nn.Module):
    """A model's last norm, as transformers computes it: in float32, and cast back in front of an RMS norm's weights.

    Parameters
    ----------
    weight, bias
        `[d_model]`, as the checkpoint has them.
    rms
        RMSNorm, or LayerNorm.
    offset
        The weights are stored less 1 (Gemma).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, eps: float, rms: bool, offset: bool) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._eps, self._rms, self._offset = eps, rms, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize rows `[..., d_model]`."""
        if not self._rms:
            return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        if self._offset:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)

    def affine(self) -> tuple[np.ndarray, np.ndarray | None]:
        """What the normalized row is multiplied by, and what is added to it; float32."""
        weight = self.weight.float() + (1.0 if self._offset else 0.0)
        return weight.numpy(), None if self.bias is None else self.bias.float().numpy()


class Unembedding(torch.nn.Module):
    """`x @ W_U + b_U`, `[..., d_model] -> [..., d_vocab]`."""

    def __init__(self, W_U: torch.Tensor, b_U: torch.Tensor) -> None:  # noqa: N803
        super().__init__()
        self.W_U, self.b_U = W_U, b_U

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, before a soft-cap."""
        return x @ self.W_U + self.b_U
