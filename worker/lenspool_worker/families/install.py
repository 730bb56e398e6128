"""Puts taps into a model: every hook of the vocabulary that its modules have a place for, and why not the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from lenspool.vocabulary import BY_NAME, HOOK_POINTS
from lenspool_worker.derived import DerivedHooks, Pattern
from lenspool_worker.families import hooking
from lenspool_worker.families.heads import HeadResults
from lenspool_worker.families.norms import norm_of
from lenspool_worker.families.shards import head_shards, heads_apart, hidden_apart, hidden_shard
from lenspool_worker.families.structure import Block, Decoder, find
from lenspool_worker.families.table import Family, family_of
from lenspool_worker.parallel import Place, Shard
from lenspool_worker.taps import Taps

_IN_ATTENTION = tuple(
    f"attn.hook_{part}" for part in ("q", "k", "v", "rot_q", "rot_k", "attn_scores", "pattern", "z", "result")
)
_IN_MLP = tuple(f"mlp.hook_{part}" for part in ("pre", "pre_linear", "post"))

_CHOICE = ("mlp.hook_expert_weights", "mlp.hook_expert_indices")


@dataclass(frozen=True)
class Site:
    """A hook that this model serves, as the model card lists it (`lenspool.card.HookInfo`).

    Attributes
    ----------
    computed
        Larger than any tensor of the model, and computed on request only: its bytes are bounded.
    prefix
        Its rows need the model to run over all earlier positions.
    """

    name: str
    width: int
    editable: bool
    shape: tuple[str, ...]
    dims: tuple[int, ...]
    dtype: str | None = None
    computed: bool = False
    prefix: bool = False


@dataclass
class Installation:
    """What a model serves after its taps were put in.

    Attributes
    ----------
    refusals
        Hook, `{layer}` in place of its layer -> why some or all layers do not serve it.
    final_norm
        The norm in front of the unembedding.
    """

    family: Family
    sites: list[Site] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    derived: DerivedHooks = field(default_factory=DerivedHooks)
    final_norm: nn.Module | None = None


class UnsupportedModel(Exception):
    """No part of a decoder was found in the model."""


def install(model: nn.Module, taps: Taps, place: Place = Place()) -> Installation:  # noqa: B008
    """Put taps into a model, before it is compiled.

    `unembed.hook_out` has no tap: the runner computes it from the final hidden states.

    Parameters
    ----------
    place
        Of this process among those of the model: it has taps in its own layers, and a part of their heads.

    Raises
    ------
    UnsupportedModel
        It has no list of layers that could be found.
    """
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    try:
        decoder = find(model, int(config.num_hidden_layers))
    except (LookupError, AttributeError) as error:
        raise UnsupportedModel(f"{type(model).__name__}: {error}") from error
    family = family_of(model, decoder.layer_parameters)
    return _Installer(config, decoder, family, taps, place).run()


class _Installer:
    def __init__(self, config: Any, decoder: Decoder, family: Family, taps: Taps, place: Place) -> None:
        self._config = config
        self._decoder = decoder
        self._family = family
        self._taps = taps
        self._place = place
        self._width = int(config.hidden_size)
        self._block = ""
        self._streams: dict[str, int] = {}
        self._out = Installation(family, refusals=dict(family.refusals), final_norm=decoder.final_norm)

    def run(self) -> Installation:
        if self._place.first:
            self._embedding()
        for number, block in self._decoder.blocks.items():
            self._block = f"blocks.{number}."
            self._streams = {}
            self._install_block(block)
        self._block = ""
        if self._place.last:
            self._unembedding(self._streams["hook_resid_post"])
        order = {point.name: place for place, point in enumerate(HOOK_POINTS)}
        served = {_form(site.name) for site in self._out.sites}
        for name in order:
            if name not in served and self._has(name):
                self._out.refusals.setdefault(name, "the model has no place for it that is known")
        self._out.sites.sort(key=lambda site: self._position(site.name, order))
        return self._out

    def _has(self, name: str) -> bool:
        """Whether a hook would be in this process's stage of a pipeline."""
        if name.startswith("blocks."):
            return True
        return self._place.first if name.endswith("embed") else self._place.last

    def _embedding(self) -> None:
        decoder = self._decoder
        entry = next(iter(decoder.blocks.values())).layer
        if self._family.embedding_at_entry or (not self._family.known and decoder.positions is None):
            hooking.before_layer(entry, decoder.layer_parameters, self._site("hook_embed", self._width))
        elif decoder.embedding is not None:
            hooking.after(decoder.embedding, self._site("hook_embed", self._width))
        else:
            self._refuse("hook_embed", "the embedding module is not under a known name")
        if decoder.positions is not None:
            hooking.after(decoder.positions, self._site("hook_pos_embed", self._width))
        else:
            self._refuse("hook_pos_embed", "the family has no learned position embedding")

    def _unembedding(self, last: int) -> None:
        self._norm("ln_final", self._decoder.final_norm, last, "the final norm is not under a known name")
        self._serve("unembed.hook_out", (int(self._config.vocab_size),))
        self._taps.site("unembed.hook_out", int(self._config.vocab_size))

    def _position(self, name: str, order: dict[str, int]) -> tuple[int, int, int]:
        """Sort key: network order."""
        place = order[_form(name)]
        if name.startswith("blocks."):
            return 1, int(name.split(".")[1]), place
        return (0 if name.endswith("embed") else 2), 0, place

    # -- one block

    def _install_block(self, block: Block) -> None:
        family, width = self._family, self._width
        self._streams["hook_resid_pre"] = self._site("hook_resid_pre", width)
        hooking.before_layer(block.layer, self._decoder.layer_parameters, self._streams["hook_resid_pre"])
        reason = "no norm precedes attention" if block.after_attention else "its norm is not under a known name"
        self._norm("ln1", block.before_attention, self._streams["hook_resid_pre"], reason)
        self._attention(block)
        self._contribution("attn", block.attention, block.after_attention, block.output)
        self._middle(block)
        self._mlp(block)
        self._contribution("mlp", block.mlp, block.after_mlp, block.down)
        self._streams["hook_resid_post"] = self._site("hook_resid_post", width)
        if family.pair:
            hooking.after_pair(block.layer, self._streams["hook_resid_post"])
        else:
            hooking.after(block.layer, self._streams["hook_resid_post"])

    def _contribution(self, part: str, module: nn.Module | None, norm: nn.Module | None, last: Any) -> None:
        """What attention or the MLP adds to the stream, and the module's output where a norm follows it; `last` is the
        projection that it ends with.
        """
        if self._place.size > 1 and (not getattr(last, "reduce_results", True) or _hands_bias_on(last)):
            reason = f"the model runs on {self._place.size} processes, and adds up their parts only in the stream"
            self._refuse(f"hook_{part}_out", reason)
        elif module is None:
            self._refuse(f"hook_{part}_out", "its module is not under a known name")
        elif norm is None:
            hooking.after(module, self._site(f"hook_{part}_out", self._width))
            self._refuse(f"{part}.hook_out", f"no norm follows: the name means hook_{part}_out")
        else:
            hooking.after(module, self._site(f"{part}.hook_out", self._width))
            hooking.after(norm, self._site(f"hook_{part}_out", self._width))

    def _middle(self, block: Block) -> None:
        """The stream between attention and MLP, and the norm in front of the MLP."""
        if self._family.always_parallel:
            self._refuse("hook_resid_mid", "attention and MLP read the same stream: there is none between them")
            base = self._streams["hook_resid_pre"]
        elif self._family.pair and block.before_mlp is not None:
            base = self._site("hook_resid_mid", self._width)
            hooking.before_norm(block.before_mlp, base)
        elif not self._family.pair and (reader := block.before_mlp or block.mlp) is not None:
            base = self._site("hook_resid_mid", self._width)
            hooking.before(reader, base)
        else:
            self._refuse("hook_resid_mid", "what reads it is not under a known name")
            base = None
        reason = "its norm is not under a known name"
        if block.after_mlp is not None:
            reason = "no norm precedes the MLP"
        elif self._family.always_parallel:
            reason = "attention and MLP share one norm, ln1"
        self._norm("ln2", block.before_mlp, base, reason)

    def _norm(self, name: str, module: nn.Module | None, stream: int | None, reason: str) -> None:
        """Output of a norm, and what it makes of the stream that it reads."""
        definition = norm_of(module) if module is not None else None
        if definition is None or stream is None:
            why = reason if module is None or stream is None else f"{type(module).__name__} is not a known kind of norm"
            for part in ("scale", "normalized"):
                self._refuse(f"{name}.hook_{part}", why)
        else:
            self._reading(f"{name}.hook_scale", stream, definition.scale, (1,), "float32")
            self._reading(f"{name}.hook_normalized", stream, definition.normalized, (self._width,))
        if module is None:
            self._refuse(f"{name}.hook_out", reason)
        else:
            hooking.after(module, self._site(f"{name}.hook_out", self._width))

    # -- attention

    def _attention(self, block: Block) -> None:
        kernel = block.kernel
        reason = "its module has no attention kernel under a known name" if kernel is None else None
        if kernel is not None and self._place.size > 1:
            reason = heads_apart(block, self._place)
        if reason is not None:
            for name in _IN_ATTENTION:
                self._refuse(name, reason)
            return
        heads, kv_heads, d_head = int(kernel.num_heads), int(kernel.num_kv_heads), int(kernel.head_size)
        shard, kv_shard = head_shards(block, self._place)
        self._projections(block, heads, kv_heads, d_head)
        if block.attention is not None and (hasattr(block.attention, "rotary_emb") or self._decoder.rotary):
            query = self._site("attn.hook_rot_q", heads, d_head, shard=shard)
            key = self._site("attn.hook_rot_k", kv_heads, d_head, shard=kv_shard)
            hooking.before_kernel(kernel, query, key)
            sources = ("attn.hook_rot_q", "attn.hook_rot_k")
        else:
            for name in ("attn.hook_rot_q", "attn.hook_rot_k"):
                self._refuse(name, "the family has no rotary embedding")
            sources = ("attn.hook_q", "attn.hook_k")
        self._pattern(kernel, sources, shard, kv_shard)
        if block.output is None:
            for name in ("attn.hook_z", "attn.hook_result"):
                self._refuse(name, "the output projection is not under a known name")
            return
        _keep_bias(block.output)
        z = self._site("attn.hook_z", heads, d_head, shard=shard)
        hooking.before(block.output, z)
        if type(getattr(block.output, "quant_method", None)).__name__ != "UnquantizedLinearMethod":
            self._refuse("attn.hook_result", "the output projection is quantized")
            return
        compute = HeadResults(heads, block.output).rows
        self._reading("attn.hook_result", z, compute, (heads, self._width), computed=True, shard=shard)

    def _projections(self, block: Block, heads: int, kv_heads: int, d_head: int) -> None:
        shapes = {"attn.hook_q": heads, "attn.hook_k": kv_heads, "attn.hook_v": kv_heads}
        shard, kv_shard = head_shards(block, self._place)
        shards = {name: shard if name == "attn.hook_q" else kv_shard for name in shapes}
        if block.joint is not None:
            _keep_bias(block.joint)
            sites = [self._site(name, count, d_head, shard=shards[name]) for name, count in shapes.items()]
            if self._family.interleaved:
                hooking.after_in_parts(block.joint, heads, [d_head] * 3, sites)
            else:
                hooking.after_in_parts(block.joint, 1, [count * d_head for count in shapes.values()], sites)
            return
        for (name, count), child in zip(shapes.items(), ("q_proj", "k_proj", "v_proj"), strict=True):
            module = getattr(block.attention, child, None)
            if module is None:
                self._refuse(name, "its projection is not under a known name")
            else:
                hooking.after(module, self._site(name, count, d_head, shard=shards[name]))

    def _pattern(self, kernel: Any, sources: tuple[str, str], shard: Shard | None, kv_shard: Shard | None) -> None:
        names = ("attn.hook_attn_scores", "attn.hook_pattern")
        served = {site.name for site in self._out.sites}
        query, key = (self._block + source for source in sources)
        implementation = kernel.impl
        reason = None
        if getattr(implementation, "alibi_slopes", None) is not None:
            reason = "attention has ALiBi biases, with which it is not computed"
        elif query not in served or key not in served:
            reason = "it is computed from queries and keys, which are not served"
        if reason is not None:
            for name in names:
                self._refuse(name, reason)
            return
        heads = int(kernel.num_heads) * _parts(shard)
        sinks: torch.Tensor | None = getattr(implementation, "sinks", None)
        if sinks is not None and shard is not None:
            sinks = shard.whole(sinks.detach().view(1, -1).clone)[0]
        for name in names:
            self._serve(name, (heads, 0), computed=True, prefix=True)
            self._out.derived[self._block + name] = Pattern(
                rows_of=query,
                prefix_of=key,
                heads=heads,
                kv_heads=int(kernel.num_kv_heads) * _parts(kv_shard),
                scale=float(implementation.scale),
                soft_cap=implementation.logits_soft_cap or None,
                window=kernel.sliding_window,
                sinks=sinks,
                scores=name == "attn.hook_attn_scores",
            )

    # -- MLP

    def _mlp(self, block: Block) -> None:
        if block.router is not None:
            experts = getattr(self._config, "num_local_experts", None) or getattr(self._config, "num_experts", None)
            width = int(experts or block.router.weight.shape[0])
            hooking.after(block.router, self._site("mlp.hook_router_logits", width))
            self._choice(block.experts)
        else:
            for name in ("mlp.hook_router_logits", *_CHOICE):
                self._refuse(name, "the MLP is not a mixture of experts")
        reason = None
        if block.router is not None:
            reason = "the experts' hidden layers exist only inside a fused kernel"
        elif block.down is None or (block.gated is None and block.up is None):
            reason = "its projections are not under known names"
        elif self._place.size > 1:
            reason = hidden_apart(block, self._place)
        if reason is not None:
            for name in _IN_MLP:
                self._refuse(name, reason)
            return
        assert block.down is not None
        shard = hidden_shard(block, self._place)
        width = int(block.down.input_size) // _parts(shard)
        if block.gated is not None:
            sites = [self._site(name, width, shard=shard) for name in ("mlp.hook_pre", "mlp.hook_pre_linear")]
            hooking.after_in_parts(block.gated, 1, [width, width], sites)
        else:
            _keep_bias(block.up)
            hooking.after(block.up, self._site("mlp.hook_pre", width, shard=shard))
            self._refuse("mlp.hook_pre_linear", "the MLP is not gated")
        _keep_bias(block.down)
        hooking.before(block.down, self._site("mlp.hook_post", width, shard=shard))

    def _choice(self, experts: Any) -> None:
        """The experts that are chosen, where vLLM chooses them outside the kernel."""
        router: Any = getattr(experts, "router", None)
        if not hasattr(router, "_compute_routing") or experts.routed_experts.quant_method.is_monolithic:
            for name in _CHOICE:
                self._refuse(name, "experts are chosen inside a fused kernel")
            return
        for name, dtype in zip(_CHOICE, ("float32", "int32"), strict=True):
            self._serve(name, (int(router.top_k),), dtype=dtype)
        hooking.after_routing(router, *(self._taps.site(self._block + name, int(router.top_k)) for name in _CHOICE))

    # -- bookkeeping

    def _site(self, name: str, *dims: int, shard: Shard | None = None) -> int:
        """A site of `dims` numbers in this process; of a shard, the whole has more in the first dimension."""
        self._serve(name, _whole(dims, shard))
        return self._taps.site(self._block + name, prod(dims), shard)

    def _reading(
        self,
        name: str,
        base: int,
        compute: Callable[[torch.Tensor], torch.Tensor],
        dims: tuple[int, ...],
        dtype: str | None = None,
        *,
        computed: bool = False,
        shard: Shard | None = None,
    ) -> None:
        self._serve(name, _whole(dims, shard), dtype=dtype, computed=computed)
        self._taps.reading(self._block + name, base, compute, shard)

    def _serve(
        self,
        name: str,
        dims: tuple[int, ...],
        dtype: str | None = None,
        *,
        computed: bool = False,
        prefix: bool = False,
    ) -> None:
        full = self._block + name
        point = BY_NAME[_form(full)]
        self._out.sites.append(Site(full, prod(dims), point.editable, point.shape, dims, dtype, computed, prefix))

    def _refuse(self, name: str, reason: str) -> None:
        self._out.refusals.setdefault(_form(self._block + name), reason)


def _parts(shard: Shard | None) -> int:
    return 1 if shard is None else shard.parts


def _whole(dims: tuple[int, ...], shard: Shard | None) -> tuple[int, ...]:
    return (dims[0] * _parts(shard), *dims[1:])


def _hands_bias_on(linear: Any) -> bool:
    """Whether a vLLM projection leaves it to its caller to add the bias."""
    return bool(getattr(linear, "skip_bias_add", False)) and getattr(linear, "bias", None) is not None


def _keep_bias(linear: Any) -> None:
    """See to it that a projection's output has its bias in it."""
    if _hands_bias_on(linear):
        hooking.add_bias(linear)


def _form(name: str) -> str:
    """`blocks.3.hook_resid_pre -> blocks.{layer}.hook_resid_pre`."""
    if not name.startswith("blocks."):
        return name
    _, _, rest = name.split(".", 2)
    return "blocks.{layer}." + rest
