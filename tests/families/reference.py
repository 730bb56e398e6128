"""The reference: every hook, read and edited in transformers' own model.

Written from the definitions and transformers' module names, knowing nothing of how lenspool finds its hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

Edit = tuple[str, Callable[[torch.Tensor], torch.Tensor], tuple[int, int]]
"""Hook, function of its rows `[n, width]`, and the positions that it applies to."""


class Reference:
    """All hooks of one model over one prompt, by module hooks."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kind = model.config.model_type
        self._edits: Sequence[Edit] = ()
        self._rows: dict[str, np.ndarray] = {}
        self._block = ""
        core = first_of(model, "model", "transformer", "gpt_neox")
        self._after(first_of(core, "embed_tokens", "wte", "word_embeddings", "embed_in"), lambda: "hook_embed")
        if hasattr(core, "wpe"):
            self._after(core.wpe, lambda: "hook_pos_embed")
        self._layers = first_of(core, "layers", "h")
        for number, layer in enumerate(self._layers):
            self._hook_layer(f"blocks.{number}.", layer)
        final = first_of(core, "norm", "ln_f", "final_layer_norm")
        final.register_forward_pre_hook(lambda module, args: self._norm("ln_final", module, args[0]))
        self._after(final, lambda: "ln_final.hook_out")

    @torch.no_grad()
    def run(self, tokens: Sequence[int], edits: Sequence[Edit] = ()) -> dict[str, np.ndarray]:
        """Hook -> `[tokens, width]` after the edits; patterns and scores as `[tokens, head * tokens]`."""
        self._edits, self._rows = edits, {}
        with self._patched():
            logits = self._model(torch.tensor([list(tokens)]), use_cache=False).logits
        self._rows["unembed.hook_out"] = _array(logits[0])
        return self._rows

    # -- one layer

    def _hook_layer(self, block: str, layer: nn.Module) -> None:
        attention = first_of(layer, "self_attn", "attn", "self_attention", "attention")
        mlp = layer.mlp
        before_attention = first_of(layer, "input_layernorm", "ln_1", "ln_attn", missing=True)
        if self._kind == "olmo2":
            before_mlp, ends = None, (layer.post_attention_layernorm, layer.post_feedforward_layernorm)
        elif self._kind in ("gemma2", "gemma3_text"):
            before_mlp = layer.pre_feedforward_layernorm
            ends = (layer.post_attention_layernorm, layer.post_feedforward_layernorm)
        else:
            before_mlp, ends = first_of(layer, "post_attention_layernorm", "ln_2", "ln_mlp", missing=True), None

        def enter(_module: Any, args: Any, options: Any) -> None:
            self._block = block
            stream = args[0] if args else options["hidden_states"]
            self._take(f"{block}hook_resid_pre", stream[0])
            if before_attention is not None:
                self._norm(f"{block}ln1", before_attention, stream)
            if self._parallel and before_mlp is not None:
                self._norm(f"{block}ln2", before_mlp, stream)

        layer.register_forward_pre_hook(enter, with_kwargs=True)
        if before_attention is not None:
            self._after(before_attention, lambda: f"{block}ln1.hook_out")
        self._hook_attention(block, attention)
        self._after(attention, lambda: f"{block}attn.hook_out" if ends else f"{block}hook_attn_out")
        self._after(mlp, lambda: f"{block}mlp.hook_out" if ends else f"{block}hook_mlp_out")
        if ends:
            self._after(ends[0], lambda: f"{block}hook_attn_out")
            self._after(ends[1], lambda: f"{block}hook_mlp_out")
        if not self._parallel:

            def middle(_module: Any, args: Any) -> None:
                self._take(f"{block}hook_resid_mid", args[0][0])
                if before_mlp is not None:
                    self._norm(f"{block}ln2", before_mlp, args[0])

            (mlp if before_mlp is None else before_mlp).register_forward_pre_hook(middle)
        if before_mlp is not None:
            self._after(before_mlp, lambda: f"{block}ln2.hook_out")
        self._hook_mlp(block, mlp)
        self._after(layer, lambda: f"{block}hook_resid_post")

    @property
    def _parallel(self) -> bool:
        config = self._model.config
        if self._kind == "falcon":
            return bool(config.parallel_attn or config.new_decoder_architecture)
        return self._kind == "gpt_neox" and bool(config.use_parallel_residual)

    def _hook_attention(self, block: str, attention: nn.Module) -> None:
        config = self._model.config
        heads = config.num_attention_heads
        output = first_of(attention, "o_proj", "c_proj", "dense")
        joint = first_of(attention, "qkv_proj", "c_attn", "query_key_value", missing=True)
        if joint is None:
            for part in "qkv":
                self._after(getattr(attention, f"{part}_proj"), lambda part=part: f"{block}attn.hook_{part}")
        else:

            def split(_module: Any, _args: Any, out: torch.Tensor) -> None:
                rows = out[0]
                d_head = config.hidden_size // heads
                if self._kind == "falcon":
                    kv = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
                    parts = rows.view(len(rows), kv, heads // kv + 2, d_head)
                    q, k, v = parts[:, :, :-2], parts[:, :, -2], parts[:, :, -1]
                elif self._kind == "gpt_neox":
                    q, k, v = rows.view(len(rows), heads, 3, d_head).unbind(2)
                else:
                    kv = getattr(config, "num_key_value_heads", heads)
                    q, k, v = rows.split([heads * d_head, kv * d_head, kv * d_head], -1)
                for part, tensor in zip("qkv", (q, k, v), strict=True):
                    self._take(f"{block}attn.hook_{part}", tensor)

            joint.register_forward_hook(split)

        def z(module: Any, args: Any) -> None:
            self._take(f"{block}attn.hook_z", args[0][0])
            weight = module.weight if self._kind != "gpt2" else module.weight.t()
            per_head = args[0][0].view(args[0].shape[1], heads, -1)
            result = torch.einsum("nhd,mhd->nhm", per_head, weight.view(len(weight), heads, -1))
            self._rows[f"{block}attn.hook_result"] = _array(result.flatten(1))

        output.register_forward_pre_hook(z)

    def _hook_mlp(self, block: str, mlp: nn.Module) -> None:
        router = first_of(mlp, "gate", "router", missing=True)
        if router is not None:

            def route(_module: Any, _args: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
                self._take(f"{block}mlp.hook_router_logits", out[0])
                weights, indices = self._route(out[0])
                self._take(f"{block}mlp.hook_expert_weights", weights)
                self._take(f"{block}mlp.hook_expert_indices", indices)
                return out[0], weights, indices

            router.register_forward_hook(route)
            return
        if hasattr(mlp, "gate_up_proj"):

            def halves(_module: Any, _args: Any, out: torch.Tensor) -> None:
                for part, tensor in zip(("pre", "pre_linear"), out[0].chunk(2, -1), strict=True):
                    self._take(f"{block}mlp.hook_{part}", tensor)

            mlp.gate_up_proj.register_forward_hook(halves)
        elif hasattr(mlp, "gate_proj"):
            self._after(mlp.gate_proj, lambda: f"{block}mlp.hook_pre")
            self._after(mlp.up_proj, lambda: f"{block}mlp.hook_pre_linear")
        else:
            self._after(first_of(mlp, "c_fc", "dense_h_to_4h"), lambda: f"{block}mlp.hook_pre")
        down = first_of(mlp, "down_proj", "c_proj", "dense_4h_to_h")
        down.register_forward_pre_hook(lambda _module, args: self._take(f"{block}mlp.hook_post", args[0][0]))

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and indices of the experts that a router chooses, from its logits."""
        count = self._model.config.num_experts_per_tok
        if self._kind == "gpt_oss":
            chosen, indices = logits.topk(count, -1)
            return chosen.softmax(-1), indices
        weights, indices = logits.softmax(-1).topk(count, -1)
        return weights / weights.sum(-1, keepdim=True), indices

    # -- what is inside the attention function

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Watch the softmax, and what attention gets after rotary."""
        modeling = sys.modules[type(self._model).__module__]
        softmax = F.softmax
        name = "apply_rotary_pos_emb" if self._kind == "falcon" else "eager_attention_forward"
        original = getattr(modeling, name)

        def watched_softmax(scores: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            pattern = softmax(scores, *args, **options)
            if scores.dim() == 4:
                n = scores.shape[2]
                for name, of in (("attn_scores", scores), ("pattern", pattern.to(scores.dtype))):
                    self._rows[f"{self._block}attn.hook_{name}"] = _array(of[0, :, :, :n].transpose(0, 1).flatten(1))
            return pattern

        def attention(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Any:
            if self._kind != "gpt2":
                self._take(f"{self._block}attn.hook_rot_q", query[0].transpose(0, 1))
                self._take(f"{self._block}attn.hook_rot_k", key[0].transpose(0, 1))
            out = original(module, query, key, *args, **options)
            if self._kind == "gpt_oss":  # its softmax gets scores less their maximum, which a sink may be
                mask = args[1]
                keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
                scores = query @ keys.transpose(2, 3) * options["scaling"] + mask
                self._rows[f"{self._block}attn.hook_attn_scores"] = _array(scores[0].transpose(0, 1).flatten(1))
            return out

        def rotary(*args: Any, **options: Any) -> Any:
            query, key = original(*args, **options)
            config = self._model.config
            self._take(f"{self._block}attn.hook_rot_q", query[0].transpose(0, 1))
            shared = config.num_attention_heads // config.num_kv_heads if config.new_decoder_architecture else 1
            heads = key[:, ::shared].clone()
            self._take(f"{self._block}attn.hook_rot_k", heads[0].transpose(0, 1))
            return query, heads.repeat_interleave(shared, 1)

        F.softmax = watched_softmax  # type: ignore[assignment]
        setattr(modeling, name, rotary if self._kind == "falcon" else attention)
        try:
            yield
        finally:
            F.softmax = softmax
            setattr(modeling, name, original)

    # -- taking rows

    def _after(self, module: nn.Module, name: Callable[[], str]) -> None:
        module.register_forward_hook(
            lambda _module, _args, out: self._take(name(), out[0][0] if isinstance(out, tuple) else out[0])
        )

    def _norm(self, name: str, module: nn.Module, stream: torch.Tensor) -> None:
        """The norm's scale and normalized input, by definition."""
        rows = stream[0].double()
        if "RMS" not in type(module).__name__:
            rows = rows - rows.mean(-1, keepdim=True)
        epsilon = first_of(module, "variance_epsilon", "eps")
        scale = (rows.square().mean(-1, keepdim=True) + epsilon).sqrt()
        self._rows[f"{name}.hook_scale"] = scale.numpy()
        self._rows[f"{name}.hook_normalized"] = (rows / scale).numpy()

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        """Edit and copy a tensor `[tokens, ...]`."""
        for hook, function, (start, stop) in self._edits:
            if hook == name:
                rows = tensor[start:stop]
                rows.copy_(function(rows.flatten(1)).view(rows.shape))
        self._rows[name] = _array(tensor.flatten(1).clone())


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Without loss; numpy has no bfloat16."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def first_of(module: Any, *names: str, missing: bool = False) -> Any:
    """The first attribute of these names that there is."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    if missing:
        return None
    raise AttributeError(f"{type(module).__name__} has none of {names}")
