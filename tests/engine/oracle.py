"""The independent oracle: transformers' own Llama, read and edited by plain module hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

Edit = tuple[str, Callable[[torch.Tensor], torch.Tensor], Sequence[tuple[int, int | None]]]
"""Hook, function of its rows `[n, width]`, and the positions that it applies to."""


class Oracle:
    """Every hook of a Llama, from one forward pass over one prompt; edits are made where the hook is.

    In float64 it is the truth for a float32 model: with some edits transformers itself is off by 1e-5 in float32.

    Parameters
    ----------
    inner
        Also queries, z and the MLP's neurons.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, *, inner: bool = False) -> None:
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        self._edits: Sequence[Edit] = ()
        self._rows: dict[str, np.ndarray] = {}
        self.hooks: list[str] = []
        core = self._model.model
        self._after(core.embed_tokens, "hook_embed")
        for i, layer in enumerate(core.layers):
            self._before(layer, f"blocks.{i}.hook_resid_pre")
            if inner:
                self._after(layer.self_attn.q_proj, f"blocks.{i}.attn.hook_q")
                self._before(layer.self_attn.o_proj, f"blocks.{i}.attn.hook_z")
                self._before(layer.mlp.down_proj, f"blocks.{i}.mlp.hook_post")
            self._after(layer.self_attn, f"blocks.{i}.hook_attn_out")
            # the block keeps this very tensor as its residual, so an edit in place reaches both
            self._before(layer.post_attention_layernorm, f"blocks.{i}.hook_resid_mid")
            self._after(layer.mlp, f"blocks.{i}.hook_mlp_out")
            self._after(layer, f"blocks.{i}.hook_resid_post")
        self._after(core.norm, "ln_final.hook_out")
        self._after(self._model.lm_head, "unembed.hook_out")

    @torch.no_grad()
    def run(self, tokens: Sequence[int], edits: Sequence[Edit] = ()) -> dict[str, np.ndarray]:
        """Hook -> `[tokens, width]`, after the edits."""
        self._edits, self._rows = edits, {}
        self._model(torch.tensor([list(tokens)]), use_cache=False)
        return self._rows

    def _before(self, module: torch.nn.Module, name: str) -> None:
        self.hooks.append(name)

        def hook(_module: Any, args: Any) -> None:
            self._take(name, args[0])

        module.register_forward_pre_hook(hook)

    def _after(self, module: torch.nn.Module, name: str) -> None:
        self.hooks.append(name)

        def hook(_module: Any, _args: Any, out: Any) -> None:
            self._take(name, out[0] if isinstance(out, tuple) else out)

        module.register_forward_hook(hook)

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        assert tensor.shape[0] == 1 and tensor.ndim == 3
        for hook, function, ranges in self._edits:
            if hook == name:
                for start, stop in ranges:
                    tensor[0, start:stop] = function(tensor[0, start:stop].clone())
        self._rows[name] = tensor[0].clone().numpy()
