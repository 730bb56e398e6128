"""Where the hooks of a model are, found by the structure of vLLM's own modules.

Layers of Llama-type models return the pair (hidden, residual); the residual stream is its sum, and the next norm adds
the two. Edits must therefore be made on the inputs of the norms, which see both.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lenspool_worker.taps import Taps, tap, tap_stream


@dataclass(frozen=True)
class Site:
    """A hook that this model serves: its name, numbers per position, and what the dimensions of its rows are called."""

    name: str
    width: int
    editable: bool = True
    shape: tuple[str, ...] = ("pos", "d_model")


class UnsupportedModel(Exception):
    """The model's modules are not where a known family has them."""


FUSED = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)
"""vLLM classes whose layers are `layer(positions, hidden_states, residual) -> (hidden, residual)`, stream = sum."""


def install(model: nn.Module, taps: Taps) -> list[Site]:
    """Put taps into a model, before it is compiled.

    Returns
    -------
    list[Site]
        What can be captured from it. `unembed.hook_out` has no tap: the runner computes it from the final hidden
        states.

    Raises
    ------
    UnsupportedModel
        Its class is not a known one, or its modules are elsewhere.
    """
    kind = type(model).__name__
    if kind not in FUSED:
        raise UnsupportedModel(f"{kind} is not supported; supported: {', '.join(sorted(FUSED))}")
    try:
        return _install_fused(model, taps)
    except AttributeError as error:
        raise UnsupportedModel(f"{kind}: {error}") from error


def _install_fused(model: Any, taps: Taps) -> list[Site]:
    core, config = model.model, model.config
    width = int(config.hidden_size)
    sites: list[Site] = []

    def site(name: str) -> int:
        sites.append(Site(name, width))
        return taps.site(name)

    _after(core.embed_tokens, site("hook_embed"))
    for i in range(core.start_layer, core.end_layer):
        layer, block = core.layers[i], f"blocks.{i}"
        _before_layer(layer, site(f"{block}.hook_resid_pre"))
        _after(layer.self_attn, site(f"{block}.hook_attn_out"))
        _before_norm(layer.post_attention_layernorm, site(f"{block}.hook_resid_mid"))
        _after(layer.mlp, site(f"{block}.hook_mlp_out"))
        _after_layer(layer, site(f"{block}.hook_resid_post"))
    _after(core.norm, site("ln_final.hook_out"))
    taps.site("unembed.hook_out")
    sites.append(Site("unembed.hook_out", int(config.vocab_size), editable=False, shape=("pos", "d_vocab")))
    return sites


# The hooks are traced by torch.compile: no closures over anything but ints.


def _after(module: nn.Module, site: int) -> None:
    """Tap a module's output, or the first part of it."""

    def hook(_module: nn.Module, _args: Any, out: Any) -> None:
        tap(out[0] if isinstance(out, tuple) else out, site)

    module.register_forward_hook(hook)


def _before_norm(norm: nn.Module, site: int) -> None:
    """Tap the stream at a norm that adds (hidden, residual)."""

    def hook(_module: nn.Module, args: Any) -> None:
        tap_stream(args[0], args[1], site)

    norm.register_forward_pre_hook(hook)


def _before_layer(layer: nn.Module, site: int) -> None:
    """Tap the stream that enters a layer; the first layer has no residual yet."""
    names = list(inspect.signature(type(layer).forward).parameters)[1:]
    hidden_at, residual_at = names.index("hidden_states"), names.index("residual")

    def hook(_module: nn.Module, args: Any) -> None:
        residual: torch.Tensor | None = args[residual_at]
        if residual is None:
            tap(args[hidden_at], site)
        else:
            tap_stream(args[hidden_at], residual, site)

    layer.register_forward_pre_hook(hook)


def _after_layer(layer: nn.Module, site: int) -> None:
    """Tap the stream that leaves a layer."""

    def hook(_module: nn.Module, _args: Any, out: Any) -> None:
        tap_stream(out[0], out[1], site)

    layer.register_forward_hook(hook)
