"""The model card: what a worker tells the pool about the model it serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from lenspool.hooks import template


@dataclass(frozen=True)
class HookInfo:
    """One hook that a model serves.

    Attributes
    ----------
    name
        Canonical name, e.g. `blocks.5.hook_resid_post`.
    width
        Numbers per position.
    editable
        Whether interventions may be placed here.
    shape
        Names of the dimensions of a captured array, e.g. `("pos", "head", "d_head")`.
    dims
        Sizes of the dimensions of one position's numbers, e.g. `(9, 64)`; `width` is their product. 0 stands for the
        number of positions of the run, and then `width` is 0. Empty: `(width,)`.
    dtype
        Numpy name, where it is not the model's.
    """

    name: str
    width: int
    editable: bool
    shape: tuple[str, ...] = ("pos", "d_model")
    dims: tuple[int, ...] = ()
    dtype: str | None = None

    def arrange(self, rows: np.ndarray) -> np.ndarray:
        """Give rows `[positions, width]`, as they are stored, the hook's shape.

        Stored rows of an attention pattern belong to query positions: `[q_pos, head * k_pos]` becomes
        `[head, q_pos, k_pos]`.
        """
        if 0 in self.dims:
            heads = self.dims[0]
            shaped = rows.reshape(len(rows), heads, rows.shape[1] // heads)
            return np.ascontiguousarray(shaped.swapaxes(0, 1))
        return rows.reshape(len(rows), *self.dims) if self.dims else rows


@dataclass(frozen=True)
class ModelCard:
    """A served model: identity, sizes, hooks and where its results lie.

    Attributes
    ----------
    id
        `name@` and 12 hex digits of the context's hash: equal ids give equal numbers.
    context
        Everything about model and engine that can change an output bit: weights' fingerprint, dtype, engine versions.
        It is part of every content key.
    refusals
        Hook template -> why this model or engine cannot serve it.
    tokenizer
        Digest of the tokenizer blob in Redis; None when the model came without tokenizer files.
    max_logprobs
        Most log-probabilities per token that a generation may ask for.
    max_batched_tokens
        Tokens in one step of the engine.
    no_prefix_reuse
        Why runs of this model that begin alike do not share rows; empty where they do.
    store_id, store_path
        Identity of the store that holds the results, and its folder as the worker sees it.
    """

    id: str
    name: str
    context: dict[str, Any]
    architecture: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_mlp: int
    vocab_size: int
    max_model_len: int
    dtype: str
    hooks: dict[str, HookInfo] = field(repr=False)
    refusals: dict[str, str] = field(default_factory=dict, repr=False)
    tokenizer: str | None = None
    max_logprobs: int = 20
    max_batched_tokens: int = 8192
    no_prefix_reuse: str = ""
    store_id: str = ""
    store_path: str = ""
    worker: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON form; hooks that are alike in several layers are written once."""
        document = {f.name: getattr(self, f.name) for f in fields(self)}
        groups: dict[HookInfo, dict[str, Any]] = {}
        for info in self.hooks.values():
            form = template(info.name)
            fields_ = {**asdict(info), "name": form, "shape": list(info.shape), "dims": list(info.dims)}
            group = groups.setdefault(replace(info, name=form), {**fields_, "layers": None})
            if form != info.name:
                group["layers"] = [*(group["layers"] or []), int(info.name.split(".")[1])]
        document["hooks"] = list(groups.values())
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ModelCard:
        """Rebuild a card from its JSON form; fields of later versions are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(
            **{k: v for k, v in document.items() if k in known and k != "hooks"}, hooks=_hooks(document["hooks"])
        )


def _hooks(groups: Iterable[Mapping[str, Any]]) -> dict[str, HookInfo]:
    out: dict[str, HookInfo] = {}
    for group in groups:
        layers = group.get("layers")
        for layer in [None] if layers is None else layers:
            name = group["name"] if layer is None else group["name"].replace("{layer}", str(layer))
            out[name] = HookInfo(
                name,
                group["width"],
                group["editable"],
                tuple(group["shape"]),
                tuple(group.get("dims", ())),
                group.get("dtype"),
            )
    return out
