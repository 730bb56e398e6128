"""The few weights that analyses on a client need, read from the model's checkpoint when they are asked for.

A pool has no call that returns weights. Its client has a folder or a name of the model anyway, for config and
tokenizer; there the unembedding and the final norm are read, each at its first use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lenspool.integrations.transformer_lens.norm import FinalNorm, Unembedding

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Weights:
    """Named tensors of a checkpoint.

    Parameters
    ----------
    model
        Folder, or name on the Hugging Face hub.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._places: dict[str, str] | None = None

    def get(self, name: str) -> torch.Tensor | None:
        """A tensor by its name in the checkpoint; None when there is none of the name.

        Raises
        ------
        FileNotFoundError
            The folder has no safetensors.
        """
        from safetensors import safe_open

        if self._places is None:
            self._places = self._index()
        if name not in self._places:
            return None
        with safe_open(str(self._file(self._places[name])), framework="pt") as tensors:
            found: torch.Tensor = tensors.get_tensor(name)
        return found

    def _index(self) -> dict[str, str]:
        """Name of each tensor -> its file."""
        from safetensors import safe_open

        index = self._file(_INDEX)
        if index is not None:
            places: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return places
        single = self._file(_SINGLE)
        if single is None:
            reason = f"{self.model} has no safetensors, from which W_U and the final norm are read"
            raise FileNotFoundError(f"{reason}: name a folder that has them (the engine's may be another)")
        with safe_open(str(single), framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), _SINGLE)

    def _file(self, name: str) -> Path | None:
        if Path(self.model).is_dir():
            path = Path(self.model) / name
            return path if path.is_file() else None
        from transformers.utils import cached_file

        found = cached_file(self.model, name, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)


class Ending:
    """Final norm and unembedding of a model, each read once.

    Parameters
    ----------
    components
        `component_mapping` of TransformerLens's adapter, which knows how the checkpoint calls its modules.
    cfg
        TransformerLens's config.
    dtype
        That the model is served in.

    Attributes
    ----------
    source
        Where the weights are read.
    """

    def __init__(self, weights: Weights, components: Mapping[str, Any], cfg: Any, dtype: torch.dtype) -> None:
        self._weights = weights
        self._components = components
        self._cfg = cfg
        self.source = weights.model
        self.dtype = dtype
        self._norm: FinalNorm | None = None
        self._unembedding: Unembedding | None = None

    @property
    def norm(self) -> FinalNorm:
        """The final norm."""
        if self._norm is None:
            rms = bool(getattr(self._cfg, "uses_rms_norm", False))
            self._norm = FinalNorm(
                self._tensor("ln_final", "weight"),
                self._optional("ln_final", "bias"),
                eps=float(self._cfg.eps),
                rms=rms,
                offset=rms and bool(getattr(self._cfg, "rmsnorm_uses_offset", False)),
            )
        return self._norm

    @property
    def unembedding(self) -> Unembedding:
        """The unembedding, `W_U` `[d_model, d_vocab]`; where it is tied, the embedding's transpose."""
        if self._unembedding is None:
            weight = self._optional("unembed", "weight")
            weight = self._tensor("embed", "weight") if weight is None else weight
            bias = self._optional("unembed", "bias")
            bias = torch.zeros(len(weight), dtype=self.dtype) if bias is None else bias
            self._unembedding = Unembedding(weight.T, bias)
        return self._unembedding

    def parameter(self, name: str) -> torch.Tensor | None:
        """A tensor of the checkpoint by its name there; a tied `lm_head.weight` is the embedding."""
        found = self._weights.get(name)
        if found is None and name == f"{self._components['unembed'].name}.weight":
            found = self._weights.get(f"{self._components['embed'].name}.weight")
        return found

    def _optional(self, component: str, part: str) -> torch.Tensor | None:
        found = self._weights.get(f"{self._components[component].name}.{part}")
        return None if found is None else found.to(self.dtype)

    def _tensor(self, component: str, part: str) -> torch.Tensor:
        found = self._optional(component, part)
        if found is None:
            raise KeyError(f"the checkpoint has no {self._components[component].name}.{part}")
        return found
