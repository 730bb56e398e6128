"""TransformerLens's hook points and the pool's hooks that are the same tensors.

A bridge names a hook by its component: `blocks.3.attn.q.hook_out`. One tensor may have several such names; those of
HookedTransformer (`blocks.3.attn.hook_q`) TransformerLens derives from these itself, as aliases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lenspool import hooks as hk
from lenspool.card import ModelCard
from lenspool.errors import InvalidJob
from lenspool.integrations.transformer_lens.errors import BadInput

_ATTN_OUT = ("attn.hook_out", "hook_attn_out")
_MLP_OUT = ("mlp.hook_out", "hook_mlp_out")

_BLOCK: dict[str, tuple[str, ...]] = {
    "hook_in": ("hook_resid_pre",),
    "ln1.hook_in": ("hook_resid_pre",),
    "ln1.hook_scale": ("ln1.hook_scale",),
    "ln1.hook_normalized": ("ln1.hook_normalized",),
    "ln1.hook_out": ("ln1.hook_out",),
    "attn.hook_in": ("ln1.hook_out",),
    "attn.q.hook_in": ("ln1.hook_out",),
    "attn.k.hook_in": ("ln1.hook_out",),
    "attn.v.hook_in": ("ln1.hook_out",),
    "attn.q.hook_out": ("attn.hook_q",),
    "attn.k.hook_out": ("attn.hook_k",),
    "attn.v.hook_out": ("attn.hook_v",),
    "attn.hook_rot_q": ("attn.hook_rot_q",),
    "attn.hook_rot_k": ("attn.hook_rot_k",),
    "attn.hook_attn_scores": ("attn.hook_attn_scores",),
    "attn.hook_pattern": ("attn.hook_pattern",),
    "attn.o.hook_in": ("attn.hook_z",),
    "attn.hook_result": ("attn.hook_result",),
    "attn.o.hook_out": _ATTN_OUT,
    "attn.hook_out": _ATTN_OUT,
    "ln1_post.hook_in": ("attn.hook_out",),
    "ln1_post.hook_out": ("hook_attn_out",),
    "ln2.hook_in": ("hook_resid_mid",),
    "ln2.hook_scale": ("ln2.hook_scale",),
    "ln2.hook_normalized": ("ln2.hook_normalized",),
    "ln2.hook_out": ("ln2.hook_out",),
    "mlp.hook_in": ("ln2.hook_out",),
    "mlp.gate.hook_in": ("ln2.hook_out",),
    "mlp.gate.hook_out": ("mlp.hook_pre",),
    "mlp.in.hook_in": ("ln2.hook_out",),
    "mlp.in.hook_out": ("mlp.hook_pre_linear", "mlp.hook_pre"),
    "mlp.out.hook_in": ("mlp.hook_post",),
    "mlp.out.hook_out": _MLP_OUT,
    "mlp.hook_out": _MLP_OUT,
    "ln2_post.hook_in": ("mlp.hook_out",),
    "ln2_post.hook_out": ("hook_mlp_out",),
    "hook_out": ("hook_resid_post",),
}
"""Name within a block -> the pool's, of which the first that is served counts."""

_WHOLE: dict[str, tuple[str, ...]] = {
    "embed.hook_out": ("hook_embed",),
    "pos_embed.hook_out": ("hook_pos_embed",),
    "ln_final.hook_in": ("blocks.{last}.hook_resid_post",),
    "ln_final.hook_scale": ("ln_final.hook_scale",),
    "ln_final.hook_normalized": ("ln_final.hook_normalized",),
    "ln_final.hook_out": ("ln_final.hook_out",),
    "unembed.hook_in": ("ln_final.hook_out",),
    "unembed.hook_out": ("unembed.hook_out",),
}

_BRANCHES = ("ln1.hook_in", "ln2.hook_in", "q.hook_in", "k.hook_in", "v.hook_in", "gate.hook_in", "mlp.in.hook_in")
"""Inputs of one of several readers: an edit there would leave the other readers, or the stream, as they are, and the
pool's edits are of the tensor itself.
"""

_ABSENT_IN_BLOCK = (
    "attn.hook_cos",
    "attn.hook_sin",
    "attn.hook_hidden_states",
    "attn.hook_attn_in",
    "attn.hook_q_input",
    "attn.hook_k_input",
    "attn.hook_v_input",
    "hook_mlp_in",
)
_ABSENT = ("embed.hook_in", "rotary_emb.hook_in", "rotary_emb.hook_out", "rotary_emb.hook_cos", "rotary_emb.hook_sin")


@dataclass(frozen=True)
class Tree:
    """The hook points of one model.

    Attributes
    ----------
    served
        Hook point -> the pool's hook, in network order.
    absent
        Hook points that TransformerLens knows of the architecture, and that the pool does not serve.
    """

    card: ModelCard
    served: Mapping[str, str]
    absent: frozenset[str]

    @classmethod
    def of(cls, card: ModelCard, components: Mapping[str, Any]) -> Tree:
        """The tree of a served model; hooks under none of TransformerLens's components keep the pool's names.

        Parameters
        ----------
        components
            `component_mapping` of TransformerLens's adapter of the architecture.
        """
        paths = set(_paths(components))
        served: dict[str, str] = {}
        absent: set[str] = set()
        for name, owner, candidates in _names(card.n_layers):
            if owner not in paths:
                continue
            found = next((candidate for candidate in candidates if candidate in card.hooks), None)
            if found is None:
                absent.add(name)
            else:
                served[name] = found
        reached = set(served.values())
        served |= {hook: hook for hook in card.hooks if hook not in reached}
        order = sorted(served, key=lambda name: hk.network_order(served[name], card.n_layers))
        return cls(card, {name: served[name] for name in order}, frozenset(absent))

    def edited(self, name: str) -> str:
        """The hook that an edit of a name is made at; any spelling of either side.

        Raises
        ------
        BadInput
            Nothing is served under the name, or the pool cannot edit there.
        """
        field = f"intervene[{name!r}]"
        if name.endswith(_BRANCHES):
            whole = self.served.get(name, "the tensor itself")
            reason = "an edit here would be of one reader's input alone, and can be captured but not edited"
            raise BadInput(field, f"Cannot intervene on {name!r}: {reason}", f"{whole}, for all readers")
        hook = self.served.get(name)
        if hook is None:
            try:
                (hook,) = hk.resolve(name, self.card, field)
            except (InvalidJob, ValueError) as error:
                reason = f"Cannot intervene on {name!r}: not in supported_hook_points"
                raise BadInput(field, f"{reason} ({error})") from None
        return hook


def _names(layers: int) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Hook point, path of its component, and what it may be in the pool, for all that there may be."""
    for name, candidates in (*_WHOLE.items(), *((name, ()) for name in _ABSENT)):
        last = tuple(candidate.replace("{last}", str(layers - 1)) for candidate in candidates)
        yield name, name.rpartition(".")[0], last
    for inner, candidates in (*_BLOCK.items(), *((name, ()) for name in _ABSENT_IN_BLOCK)):
        owner = f"blocks.{inner}".rpartition(".")[0]
        for layer in range(layers):
            block = f"blocks.{layer}."
            yield block + inner, owner, tuple(block + candidate for candidate in candidates)


def _paths(components: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths of all components: `blocks.attn.q`."""
    for name, component in components.items():
        yield prefix + name
        yield from _paths(getattr(component, "submodules", None) or {}, f"{prefix}{name}.")
