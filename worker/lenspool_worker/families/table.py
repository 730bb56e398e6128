"""The families of models, as vLLM 0.32 implements them: only what the structure of their modules does not show."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Family:
    """What has to be known of a family of models.

    Attributes
    ----------
    architectures
        Names of the model classes, as in a checkpoint's config.
    pair
        Layers take and return (hidden, residual), and the residual stream is their sum. Otherwise it is the first
        tensor that they take and return, whatever comes with it.
    parallel
        Attribute of the config that says whether attention and MLP read the same stream; None when they never do.
    always_parallel
        They always do.
    embedding_at_entry
        Embeddings are scaled after the embedding module: `hook_embed` is read where the first layer begins.
    interleaved
        The joint projection has queries, keys and values of each head next to one another.
    known
        False for an architecture that is not in the table and has been guessed by its structure.
    notes
        What users of the family should know.
    refusals
        Hook -> why no model of the family can serve it, where the structure alone would not tell.
    """

    name: str
    architectures: tuple[str, ...]
    pair: bool = True
    parallel: str | None = None
    always_parallel: bool = False
    embedding_at_entry: bool = False
    interleaved: bool = False
    known: bool = True
    notes: str = ""
    refusals: dict[str, str] = field(default_factory=dict)


_POST_NORM = (
    "Norms follow attention and MLP: hook_attn_out and hook_mlp_out are what is added to the stream, attn.hook_out and "
    "mlp.hook_out what the modules put out"
)

FAMILIES: tuple[Family, ...] = (
    Family("Llama", ("LlamaForCausalLM",), notes="Also SmolLM2, TinyLlama, Yi, DeepSeek-LLM and others of the class"),
    Family("Mistral", ("MistralForCausalLM",)),
    Family("Qwen2", ("Qwen2ForCausalLM",), notes="Also Qwen2.5"),
    Family("Qwen3", ("Qwen3ForCausalLM",), notes="attn.hook_q and hook_k are read in front of the query and key norms"),
    Family("Phi-3", ("Phi3ForCausalLM",), notes="Also Phi-4"),
    Family(
        "Gemma-2",
        ("Gemma2ForCausalLM",),
        embedding_at_entry=True,
        notes=f"{_POST_NORM}. Scores and logits are soft-capped",
    ),
    Family(
        "Gemma-3",
        ("Gemma3ForCausalLM",),
        embedding_at_entry=True,
        notes=f"{_POST_NORM}. attn.hook_q and hook_k are read in front of the query and key norms",
    ),
    Family(
        "Mixtral",
        ("MixtralForCausalLM",),
        notes="A mixture of experts: the stream, attention, the router's logits and choice",
    ),
    Family("Qwen3-MoE", ("Qwen3MoeForCausalLM",), notes="As Mixtral; query and key norms as Qwen3"),
    Family(
        "gpt-oss",
        ("GptOssForCausalLM",),
        notes="As Mixtral. Attention has sinks: rows of the pattern sum to less than 1",
    ),
    Family("GPT-2", ("GPT2LMHeadModel",), pair=False),
    Family(
        "Falcon",
        ("FalconForCausalLM", "RWForCausalLM"),
        pair=False,
        parallel="parallel_attn",
        notes="With parallel attention there is no hook_resid_mid; with one norm for both (Falcon-7B) no ln2",
    ),
    Family("StableLM", ("StableLmForCausalLM", "StableLMEpochForCausalLM"), pair=False),
    Family("OLMo-2", ("Olmo2ForCausalLM",), pair=False, notes=f"{_POST_NORM}. No norm precedes them: no ln1, no ln2"),
    Family(
        "GPT-NeoX",
        ("GPTNeoXForCausalLM",),
        pair=False,
        parallel="use_parallel_residual",
        interleaved=True,
        notes="Also Pythia. With parallel attention there is no hook_resid_mid, and ln2 reads the stream that enters "
        "the block",
    ),
)


def family_of(model: Any, layer_parameters: list[str]) -> Family:
    """The family of a vLLM model, by the architecture in its config; a guess for an unknown one.

    Parameters
    ----------
    layer_parameters
        Names of the parameters of a layer's forward.
    """
    architectures = list(getattr(model.config, "architectures", None) or [type(model).__name__])
    for family in FAMILIES:
        if set(family.architectures) & set(architectures):
            parallel = family.parallel is not None and bool(getattr(model.config, family.parallel, False))
            return replace(family, always_parallel=parallel)
    return Family(architectures[0], tuple(architectures), pair="residual" in layer_parameters, known=False)
