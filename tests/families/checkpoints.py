"""Tiny random checkpoints of every family, made with transformers' own config classes.

Small, yet with what makes a family different: grouped queries, windows shorter than the prompts, soft-caps, sinks.
vLLM's CPU attention takes no heads narrower than 32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

LAYERS, WIDTH, HEADS, KV_HEADS, VOCABULARY = 3, 128, 4, 2, 160
WINDOW = 8
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _llama_like(config: Any, **options: Any) -> Any:
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": 192,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    return config(**{**sizes, **_SPECIAL, **options})


def _neox_like(config: Any, **options: Any) -> Any:
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
    }
    return config(**{**sizes, **_SPECIAL, **options})


_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, Any] = {
    "Llama": lambda: _llama_like(tf.LlamaConfig, head_dim=32),
    "Mistral": lambda: _llama_like(tf.MistralConfig, head_dim=32, sliding_window=WINDOW),
    "Qwen2": lambda: _llama_like(tf.Qwen2Config),
    # heads together wider than the stream
    "Qwen3": lambda: _llama_like(tf.Qwen3Config, head_dim=64),
    "Phi-3": lambda: _llama_like(tf.Phi3Config, sliding_window=WINDOW),
    "Gemma-2": lambda: _llama_like(
        tf.Gemma2Config,
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
        query_pre_attn_scalar=48,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,
    ),
    "Gemma-3": lambda: _llama_like(
        tf.Gemma3TextConfig,
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
        query_pre_attn_scalar=48,
        tie_word_embeddings=True,
    ),
    "Mixtral": lambda: _llama_like(tf.MixtralConfig, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
    "Qwen3-MoE": lambda: _llama_like(
        tf.Qwen3MoeConfig,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        mlp_only_layers=[2],  # layer 2 has an ordinary MLP
    ),
    "gpt-oss": lambda: _llama_like(
        tf.GptOssConfig,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
    ),
    "GPT-2": lambda: tf.GPT2Config(
        n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=256, vocab_size=VOCABULARY, **_SPECIAL
    ),
    # as Falcon-40B: grouped queries, two norms side by side
    "Falcon": lambda: _neox_like(
        tf.FalconConfig, num_kv_heads=KV_HEADS, new_decoder_architecture=True, alibi=False, bias=False
    ),
    # as Falcon-7B: one key and value head, one norm for attention and MLP
    "Falcon (one norm)": lambda: _neox_like(
        tf.FalconConfig, multi_query=True, parallel_attn=True, alibi=False, bias=False
    ),
    # one after the other, with biases, which vLLM's modules hand to their caller
    "Falcon (sequential)": lambda: _neox_like(
        tf.FalconConfig, multi_query=False, parallel_attn=False, alibi=False, bias=True
    ),
    "StableLM": lambda: _llama_like(tf.StableLmConfig, use_parallel_residual=False, partial_rotary_factor=0.25),
    "OLMo-2": lambda: _llama_like(tf.Olmo2Config),
    "GPT-NeoX": lambda: _neox_like(
        tf.GPTNeoXConfig, intermediate_size=256, use_parallel_residual=True, tie_word_embeddings=False
    ),
    "GPT-NeoX (sequential)": lambda: _neox_like(
        tf.GPTNeoXConfig, intermediate_size=256, use_parallel_residual=False, tie_word_embeddings=False
    ),
}
"""Name of a family, perhaps with a variant in brackets -> its config."""

UNKNOWN: dict[str, Any] = {
    # multiplies what attention and MLP add to the stream; scores are scaled as softly as elsewhere here, as the
    # default of 1 makes the softmax amplify rounding
    "Granite": lambda: _llama_like(
        tf.GraniteConfig, residual_multiplier=0.5, embedding_multiplier=2.0, attention_multiplier=0.2
    ),
}
"""Architectures that are not in the table."""


def make(name: str, folder: Path) -> Any:
    """Write a checkpoint with random weights, and return transformers' model of it."""
    config = {**CONFIGS, **UNKNOWN}[name]()
    config.dtype = "float32"
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    random = torch.Generator().manual_seed(1)
    offset_norms = name.startswith("Gemma")  # whose norms multiply by 1 + weight
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_norm = "norm" in parameter_name or ".ln_" in parameter_name
            noise = torch.randn(parameter.shape, generator=random) * (0.2 if parameter.dim() > 1 else 0.3)
            noise += float(is_norm and parameter_name.endswith("weight") and not offset_norms)
            parameter.copy_(noise.bfloat16())  # float32 numbers that bfloat16 has as well: one checkpoint for both
    model.save_pretrained(folder)
    return model
