"""Module hooks that run a tap.

They are traced by torch.compile: they close over nothing but ints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lenspool_worker.taps import tap, tap_experts, tap_parts, tap_stream


def after(module: nn.Module, site: int) -> None:
    """Tap a module's output, or the first part of it."""

    def hook(_module: nn.Module, _args: Any, out: Any) -> None:
        tap(out[0] if isinstance(out, tuple) else out, site)

    module.register_forward_hook(hook)


def after_in_parts(module: nn.Module, groups: int, widths: list[int], sites: list[int]) -> None:
    """Tap parts of a projection's output."""

    def hook(_module: nn.Module, _args: Any, out: Any) -> None:
        tap_parts(out[0] if isinstance(out, tuple) else out, groups, widths, sites)

    module.register_forward_hook(hook)


def before(module: nn.Module, site: int) -> None:
    """Tap a module's first input."""

    def hook(_module: nn.Module, args: Any, options: Any) -> None:
        tap(args[0] if args else next(iter(options.values())), site)

    module.register_forward_pre_hook(hook, with_kwargs=True)


def before_norm(norm: nn.Module, site: int) -> None:
    """Tap the stream at a norm that adds (hidden, residual)."""

    def hook(_module: nn.Module, args: Any) -> None:
        tap_stream(args[0], args[1], site)

    norm.register_forward_pre_hook(hook)


def before_layer(layer: nn.Module, parameters: list[str], site: int) -> None:
    """Tap the stream that enters a layer; of pairs, the first layer has no residual yet."""
    hidden_at = parameters.index("hidden_states") if "hidden_states" in parameters else 0
    residual_at = parameters.index("residual") if "residual" in parameters else -1

    def hook(_module: nn.Module, args: Any, options: Any) -> None:
        hidden = args[hidden_at] if hidden_at < len(args) else options["hidden_states"]
        residual: torch.Tensor | None = None
        if residual_at >= 0:
            residual = args[residual_at] if residual_at < len(args) else options.get("residual")
        if residual is None:
            tap(hidden, site)
        else:
            tap_stream(hidden, residual, site)

    layer.register_forward_pre_hook(hook, with_kwargs=True)


def after_pair(layer: nn.Module, site: int) -> None:
    """Tap the stream that leaves a layer as a pair."""

    def hook(_module: nn.Module, _args: Any, out: Any) -> None:
        tap_stream(out[0], out[1], site)

    layer.register_forward_hook(hook)


def before_kernel(kernel: Any, query: int, key: int) -> None:
    """Tap the queries and keys that an attention kernel takes. Wraps `forward`: vLLM's Transformers backend calls it
    without its module's hooks.
    """
    forward = kernel.forward

    def tapped(q: torch.Tensor, k: torch.Tensor, *args: Any, **options: Any) -> Any:
        tap(q, query)
        tap(k, key)
        return forward(q, k, *args, **options)

    kernel.forward = tapped


def after_routing(router: Any, weights: int, indices: int) -> None:
    """Tap the experts that vLLM's router object, which is not a module, chooses: numbered as in the checkpoint, before
    they are mapped to where their copies are.
    """
    choose = router._compute_routing

    def tapped(*args: Any, **options: Any) -> Any:
        chosen = choose(*args, **options)
        tap_experts(chosen[0], chosen[1], weights, indices)
        return chosen

    router._compute_routing = tapped


def add_bias(linear: nn.Module) -> None:
    """Have a vLLM projection that hands its bias to the caller add it itself, so that its output is the whole one."""

    def hook(module: nn.Module, _args: Any, out: Any) -> Any:
        return out[0] + module.bias, None

    linear.register_forward_hook(hook)
