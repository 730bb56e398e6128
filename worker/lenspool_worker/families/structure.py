"""Finds the parts of a decoder among vLLM's modules, by the names that its model classes use for them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

_LAYERS = ("layers", "h", "blocks")
_EMBEDDING = ("embed_tokens", "wte", "word_embeddings", "embed_in", "embedding")
_POSITIONS = ("wpe",)
_FINAL_NORM = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f")
_ATTENTION = ("self_attn", "attn", "self_attention", "attention")
_JOINT = ("qkv_proj", "c_attn", "query_key_value", "W_pack", "qkv")
_OUTPUT = ("o_proj", "c_proj", "dense", "out_proj", "wo")
_MLP = ("mlp", "block_sparse_moe", "feed_forward", "ffn")
_GATED = ("gate_up_proj", "w1w3")
_UP = ("c_fc", "dense_h_to_4h", "fc_in", "fc1", "up_proj")
_DOWN = ("down_proj", "c_proj", "dense_4h_to_h", "fc_out", "fc2")
_ROUTER = ("gate", "router")
_BEFORE_ATTENTION = ("input_layernorm", "ln_1", "ln_attn", "attention_norm")
_BEFORE_MLP = ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2", "ln_mlp", "ffn_norm")
_AFTER_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm")


@dataclass(frozen=True)
class Block:
    """Modules of one layer; None for what it does not have, or not under a known name.

    Attributes
    ----------
    kernel
        vLLM's `Attention`, which takes queries, keys and values.
    before_attention, after_attention, before_mlp, after_mlp
        Norms.
    gated, up, down
        Projections of the MLP: gate and up in one, up alone, down.
    router, experts
        Of a mixture of experts: the linear layer that scores them, and vLLM's fused layer.
    """

    layer: nn.Module
    attention: nn.Module | None
    kernel: Any
    joint: nn.Module | None
    output: Any
    mlp: nn.Module | None
    gated: Any
    up: Any
    down: nn.Module | None
    router: Any
    experts: Any
    before_attention: nn.Module | None
    after_attention: nn.Module | None
    before_mlp: nn.Module | None
    after_mlp: nn.Module | None


@dataclass(frozen=True)
class Decoder:
    """Modules of a model; `blocks` are those of this process, by layer number."""

    embedding: nn.Module | None
    positions: nn.Module | None
    final_norm: nn.Module | None
    blocks: dict[int, Block]
    rotary: bool

    @property
    def layer_parameters(self) -> list[str]:
        """Names of the parameters of a layer's forward, without self."""
        layer = next(iter(self.blocks.values())).layer
        return list(inspect.signature(type(layer).forward).parameters)[1:]


def find(model: nn.Module, layers: int) -> Decoder:
    """Find the decoder of a model with that many layers.

    Raises
    ------
    LookupError
        There is no list of that many layers under a known name.
    """
    for _, core in model.named_modules():
        stack = child(core, _LAYERS)
        if isinstance(stack, nn.ModuleList) and len(stack) == layers:
            blocks = {i: _block(layer) for i, layer in enumerate(stack) if not _missing(layer)}
            return Decoder(
                embedding=child(core, _EMBEDDING),
                positions=child(core, _POSITIONS),
                final_norm=child(core, _FINAL_NORM),
                blocks=blocks,
                rotary=child(core, ("rotary_emb",)) is not None,
            )
    raise LookupError(f"no list of {layers} layers under a known name ({', '.join(_LAYERS)})")


def child(module: nn.Module | None, names: tuple[str, ...]) -> nn.Module | None:
    """The first child of one of the names that this process has."""
    for name in names:
        found = getattr(module, name, None)
        if isinstance(found, nn.Module) and not _missing(found):
            return found
    return None


def _missing(module: nn.Module) -> bool:
    """Whether another stage of a pipeline has this module."""
    return type(module).__name__ == "PPMissingLayer"


def _block(layer: nn.Module) -> Block:
    attention, mlp = child(layer, _ATTENTION), child(layer, _MLP)
    after_mlp = child(layer, _AFTER_MLP)
    after_attention = None
    before_mlp = child(layer, _BEFORE_MLP)
    if after_mlp is not None:
        # what `post_attention_layernorm` is depends on its neighbours
        after_attention = child(layer, ("post_self_attn_layernorm", "post_attention_layernorm"))
        before_mlp = child(layer, ("pre_feedforward_layernorm",))
        if before_mlp is None and child(layer, ("post_self_attn_layernorm",)) is not None:
            before_mlp = child(layer, ("post_attention_layernorm",))
    return Block(
        layer=layer,
        attention=attention,
        kernel=child(attention, ("attn",)),
        joint=child(attention, _JOINT),
        output=child(attention, _OUTPUT),
        mlp=mlp,
        gated=child(mlp, _GATED),
        up=child(mlp, _UP),
        down=child(mlp, _DOWN),
        router=child(mlp, _ROUTER),
        experts=child(mlp, ("experts",)),
        before_attention=child(layer, _BEFORE_ATTENTION),
        after_attention=after_attention,
        before_mlp=before_mlp,
        after_mlp=after_mlp,
    )
