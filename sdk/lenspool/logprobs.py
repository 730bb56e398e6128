"""Log-probabilities of a generation's tokens, as arrays, and their form in the store."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_DTYPES = {
    "token_ids": np.dtype("<i4"),
    "logprobs": np.dtype("<f4"),
    "ranks": np.dtype("<i4"),
    "top_token_ids": np.dtype("<i4"),
    "top_logprobs": np.dtype("<f4"),
}


@dataclass(frozen=True, eq=False)
class Logprobs:
    """What the model thought of each token where it stands, and of the k likeliest ones in its place.

    Of the logits themselves: natural logarithms, before temperature, penalties, biases and top-p. Row i is about
    generated token i, or about prompt token i + 1: nothing predicts the first token of a prompt.

    Attributes
    ----------
    token_ids
        int32 `[n]`: the tokens.
    logprobs
        float32 `[n]`: their log-probabilities.
    ranks
        int32 `[n]`: their ranks; 1 is the likeliest. Of equally likely tokens each has the worst of their ranks.
    top_token_ids
        int32 `[n, k]`: the likeliest tokens, best first.
    top_logprobs
        float32 `[n, k]`: theirs.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    top_token_ids: np.ndarray
    top_logprobs: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)

    def to_document(self) -> dict[str, Any]:
        """JSON form: the arrays' bytes, little-endian, in base64."""
        parts = {n: np.asarray(getattr(self, n), dtype).tobytes() for n, dtype in _DTYPES.items()}
        return {"k": self.top_token_ids.shape[1]} | {n: base64.b64encode(part).decode() for n, part in parts.items()}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Logprobs:
        """Rebuild from the JSON form; the arrays are read-only."""
        flat = {n: np.frombuffer(base64.b64decode(document[n]), dtype) for n, dtype in _DTYPES.items()}
        shape = (len(flat["token_ids"]), document["k"])
        return cls(**{n: a.reshape(shape) if n.startswith("top_") else a for n, a in flat.items()})

    def __repr__(self) -> str:
        return f"<Logprobs of {len(self)} tokens, top {self.top_token_ids.shape[1]}>"
