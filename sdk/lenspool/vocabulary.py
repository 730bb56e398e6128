"""The hooks: their names, shapes and meanings, in the order in which the network computes them.

Names and definitions are TransformerLens's. This table is the only list of them: names resolve against it
(`lenspool.hooks`), workers place taps by it, docs/hooks.md is written from it. Which of them a given model serves is
said by its card.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HookPoint:
    """One hook of the vocabulary.

    Attributes
    ----------
    name
        Canonical name; `{layer}` stands for a block's index.
    shape
        Names of the dimensions of a captured array.
    meaning
        What the numbers are.
    editable
        Whether interventions may be placed there, where a model serves it.
    aliases
        Other accepted names.
    """

    name: str
    shape: tuple[str, ...]
    meaning: str
    editable: bool = True
    aliases: tuple[str, ...] = ()


_STREAM = ("pos", "d_model")
_QUERY = ("pos", "head", "d_head")
_KEY = ("pos", "kv_head", "d_head")
_SCALE = ("pos", "1")
_PATTERN = ("head", "q_pos", "k_pos")
_B = "blocks.{layer}."


HOOK_POINTS: tuple[HookPoint, ...] = (
    HookPoint(
        "hook_embed",
        _STREAM,
        "Token embedding, as it enters the residual stream (where the family scales embeddings: scaled)",
        aliases=("embed.hook_out", "embed"),
    ),
    HookPoint("hook_pos_embed", _STREAM, "Learned position embedding", aliases=("pos_embed.hook_out",)),
    HookPoint(
        _B + "hook_resid_pre",
        _STREAM,
        "Residual stream that enters the block",
        aliases=(_B + "hook_in", _B + "ln1.hook_in", "resid_pre.{layer}"),
    ),
    HookPoint(_B + "ln1.hook_scale", _SCALE, "What the norm in front of attention divides by, epsilon included", False),
    HookPoint(
        _B + "ln1.hook_normalized", _STREAM, "The stream divided by that scale, before the norm's weights", False
    ),
    HookPoint(_B + "ln1.hook_out", _STREAM, "Output of the norm in front of attention", aliases=(_B + "attn.hook_in",)),
    HookPoint(
        _B + "attn.hook_q",
        _QUERY,
        "Output of the query projection: before query norms (Qwen3, Gemma-3, OLMo-2) and before rotary",
        aliases=("q.{layer}",),
    ),
    HookPoint(_B + "attn.hook_k", _KEY, "Output of the key projection, likewise", aliases=("k.{layer}",)),
    HookPoint(_B + "attn.hook_v", _KEY, "Output of the value projection", aliases=("v.{layer}",)),
    HookPoint(
        _B + "attn.hook_rot_q", _QUERY, "Queries as attention takes them, after rotary", aliases=("rot_q.{layer}",)
    ),
    HookPoint(_B + "attn.hook_rot_k", _KEY, "Keys as attention takes them, after rotary", aliases=("rot_k.{layer}",)),
    HookPoint(
        _B + "attn.hook_attn_scores",
        _PATTERN,
        "Attention scores: scaled and soft-capped, masked keys at the dtype's lowest number; computed from the queries "
        "and keys of the same run",
        False,
        aliases=("attn_scores.{layer}",),
    ),
    HookPoint(
        _B + "attn.hook_pattern",
        _PATTERN,
        "Attention probabilities: softmax of the scores, with what a sink takes left out; computed likewise",
        False,
        aliases=("pattern.{layer}",),
    ),
    HookPoint(
        _B + "attn.hook_z",
        _QUERY,
        "Values mixed by the pattern, per head: what the output projection takes",
        aliases=("z.{layer}",),
    ),
    HookPoint(
        _B + "attn.hook_result",
        ("pos", "head", "d_model"),
        "Each head's part of the attention output: z @ W_O per head, without bias; computed on request",
        False,
        aliases=("result.{layer}",),
    ),
    HookPoint(
        _B + "attn.hook_out",
        _STREAM,
        "Output of the attention module in front of the norm that follows it. Where no norm follows, the name means "
        "hook_attn_out",
    ),
    HookPoint(
        _B + "hook_attn_out",
        _STREAM,
        "What attention adds to the residual stream",
        aliases=(_B + "attn.hook_out", "attn_out.{layer}"),
    ),
    HookPoint(
        _B + "hook_resid_mid",
        _STREAM,
        "Residual stream between attention and MLP",
        aliases=(_B + "ln2.hook_in", "resid_mid.{layer}"),
    ),
    HookPoint(_B + "ln2.hook_scale", _SCALE, "What the norm in front of the MLP divides by, epsilon included", False),
    HookPoint(
        _B + "ln2.hook_normalized", _STREAM, "The stream divided by that scale, before the norm's weights", False
    ),
    HookPoint(_B + "ln2.hook_out", _STREAM, "Output of the norm in front of the MLP", aliases=(_B + "mlp.hook_in",)),
    HookPoint(
        _B + "mlp.hook_router_logits", ("pos", "expert"), "Output of the router of a mixture of experts, before softmax"
    ),
    HookPoint(
        _B + "mlp.hook_expert_weights",
        ("pos", "chosen"),
        "What the outputs of the chosen experts are multiplied by, largest first",
        False,
    ),
    HookPoint(_B + "mlp.hook_expert_indices", ("pos", "chosen"), "The chosen experts, in the order of weights", False),
    HookPoint(
        _B + "mlp.hook_pre",
        ("pos", "d_mlp"),
        "MLP before its activation function (gated: output of the gate projection)",
        aliases=("mlp_pre.{layer}",),
    ),
    HookPoint(
        _B + "mlp.hook_pre_linear",
        ("pos", "d_mlp"),
        "Gated MLP: output of the up projection, which the activated gate multiplies",
        aliases=("mlp_pre_linear.{layer}",),
    ),
    HookPoint(
        _B + "mlp.hook_post",
        ("pos", "d_mlp"),
        "MLP after its activation function (gated: times the up projection): what the down projection takes",
        aliases=("mlp_post.{layer}",),
    ),
    HookPoint(
        _B + "mlp.hook_out",
        _STREAM,
        "Output of the MLP module in front of the norm that follows it. Where no norm follows, the name means "
        "hook_mlp_out",
    ),
    HookPoint(
        _B + "hook_mlp_out",
        _STREAM,
        "What the MLP adds to the residual stream",
        aliases=(_B + "mlp.hook_out", "mlp_out.{layer}"),
    ),
    HookPoint(
        _B + "hook_resid_post",
        _STREAM,
        "Residual stream that leaves the block",
        aliases=(_B + "hook_out", "resid_post.{layer}"),
    ),
    HookPoint("ln_final.hook_scale", _SCALE, "What the final norm divides by, epsilon included", False),
    HookPoint(
        "ln_final.hook_normalized", _STREAM, "The stream divided by that scale, before the norm's weights", False
    ),
    HookPoint("ln_final.hook_out", _STREAM, "Output of the final norm", aliases=("unembed.hook_in",)),
    HookPoint(
        "unembed.hook_out",
        ("pos", "d_vocab"),
        "Logits, as sampling sees them: scaled and soft-capped where the family does",
        False,
        aliases=("logits", "hook_unembed"),
    ),
)

BY_NAME: dict[str, HookPoint] = {point.name: point for point in HOOK_POINTS}
"""Canonical name -> hook."""
