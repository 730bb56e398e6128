"""The model card: what a worker tells the pool about the model it serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

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
        Names of the dimensions of a captured array, e.g. `("pos", "d_model")`.
    """

    name: str
    width: int
    editable: bool
    shape: tuple[str, ...] = ("pos", "d_model")


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
    store_id: str = ""
    store_path: str = ""
    worker: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON form; hooks of equal form in several layers are written once."""
        document = {f.name: getattr(self, f.name) for f in fields(self)}
        groups: dict[str, dict[str, Any]] = {}
        for info in self.hooks.values():
            form = template(info.name)
            group = groups.setdefault(form, {**asdict(info), "name": form, "shape": list(info.shape), "layers": None})
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
            out[name] = HookInfo(name, group["width"], group["editable"], tuple(group["shape"]))
    return out
