"""The arithmetic of readouts that have a row per position: float32, whatever the rows' dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lenspool.entries import Entry

Arrays = Callable[[str], torch.Tensor]
"""Digest -> float32 array, on the device of the rows."""


def read(entry: Entry, rows: torch.Tensor, arrays: Arrays, next_tokens: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Compute a readout of rows `[n, width]`.

    Parameters
    ----------
    next_tokens
        `[n]` ids of the tokens that follow, for `loss`.

    Returns
    -------
    dict
        Part -> `[n, ...]`, on the device of the rows.
    """
    x = rows.float()
    op, args = entry.op, entry.args
    if op == "top_k":
        values, indices = x.topk(args[0], dim=-1)
        return {"indices": indices.int(), "values": values}
    if op in ("logprobs", "logits_of", "rank"):
        chosen = x[:, torch.tensor(args[0], device=x.device)]
        if op == "rank":
            # one by one, as [n, tokens, vocabulary] would be large
            larger = [(x > chosen[:, i, None]).sum(-1) for i in range(chosen.shape[1])]
            return {"": torch.stack(larger, -1).int()}
        return {"": chosen - x.logsumexp(-1, keepdim=True) if op == "logprobs" else chosen}
    if op == "loss":
        assert next_tokens is not None
        return {"": x.logsumexp(-1) - x.gather(1, next_tokens[:, None].to(x.device))[:, 0]}
    if op == "entropy":
        return {"": torch.special.entr(x.softmax(-1)).sum(-1)}
    if op == "norm":
        return {"": torch.linalg.vector_norm(x, dim=-1)}
    if op == "project":
        return {"": x @ _array(arrays, args[0], (x.shape[1], args[1]))}
    if op == "sae":
        return _features(entry, x, arrays)
    raise ValueError(f"unknown readout {op!r}")


def _features(entry: Entry, x: torch.Tensor, arrays: Arrays) -> dict[str, torch.Tensor]:
    activation, k = entry.args[:2]
    shapes = entry.shapes(x.shape[1])
    given = {name: _array(arrays, digest, shapes[name]) for name, digest in entry.arrays.items()}
    if "b_dec" in given:
        x = x - given["b_dec"]
    before = x @ given["W_enc"] + given["b_enc"]
    after = before.relu()
    if activation == "jumprelu":
        after = after * (before > given["threshold"])
    values, indices = after.topk(k, dim=-1)
    active = ((values if activation == "topk" else after) > 0).sum(-1)
    return {"indices": indices.masked_fill(values <= 0, -1).int(), "values": values, "active": active.int()}


def _array(arrays: Arrays, digest: str, shape: tuple[int, ...]) -> torch.Tensor:
    array = arrays(digest)
    if array.shape != shape:
        raise ValueError(f"the array {digest[:16]} has shape {tuple(array.shape)}, not {shape}")
    return array
