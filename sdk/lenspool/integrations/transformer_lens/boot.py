"""`boot_pool`: TransformerLens's `boot_vllm`, on a pool."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge.sources._bridge_builder import (
    build_bridge_config_from_hf,
    configure_tokenizer,
)
from transformer_lens.model_bridge.sources._hf_format import determine_architecture_from_hf_config
from transformers import AutoConfig, AutoTokenizer

from lenspool.card import ModelCard
from lenspool.client import Client
from lenspool.config import settings
from lenspool.integrations.transformer_lens.bridge import PoolBridge
from lenspool.integrations.transformer_lens.driver import PoolDriver
from lenspool.integrations.transformer_lens.errors import BadInput
from lenspool.integrations.transformer_lens.pool import Pool
from lenspool.integrations.transformer_lens.tree import Tree
from lenspool.integrations.transformer_lens.weights import Ending, Weights
from lenspool.local import connect_local
from lenspool.sync import Client as SyncClient

_OURS = ("skip_tokenizer_init", "enable_batching", "enable_position_interventions")
"""Arguments of `boot_vllm` for what a pool does anyway."""


def boot(
    model_name: str,
    client: str | Client | SyncClient | None = None,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    gpu_memory_utilization: float | None = None,
    max_model_len: int | None = None,
    max_num_batched_tokens: int | None = None,
    enable_batching: bool | None = None,
    enable_position_interventions: bool | None = None,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    served_as: str | None = None,
    store: str | Path | None = None,
    **vllm_kwargs: Any,
) -> PoolBridge:
    """A bridge to a pool; a call of `boot_vllm` runs with this function's name in its place.

    Parameters
    ----------
    model_name
        Model folder, or name on the Hugging Face hub: config and tokenizer are read there, and, only when they are
        used, the weights of final norm and unembedding.
    client
        Redis URL of a pool, or a client of lenspool, whose settings are taken. Default `LENSPOOL_REDIS`, or the
        configuration; without one a pool is started on this machine, and stopped by the bridge's `close`.
    tokenizer
        A transformers tokenizer, in place of the model's.
    dtype, max_model_len
        Of a pool that is started here; default the checkpoint's, and the model's. Of a running pool: what it must have.
    gpu_memory_utilization, max_num_batched_tokens, tensor_parallel_size, pipeline_parallel_size, vllm_kwargs
        Of a pool that is started here: arguments of its engine, default 0.5, 2048, 1 and 1. Longer prompts than
        `max_num_batched_tokens` are run in chunks. A running pool has its own; then they are noted in a warning.
    enable_batching, enable_position_interventions
        Without effect: a pool does both, also together and over several devices.
    served_as
        Name of the model in a running pool, where that serves several.
    store
        Folder of results; see `lenspool.Client`, or `lenspool.connect_local` for a pool that is started here.

    Raises
    ------
    ValueError
        An argument is wrong or conflicts with the pool, or TransformerLens does not know the architecture.
    PoolUnavailable, UnknownModel
        See `lenspool.errors`.
    """
    engine = _engine(
        {
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max_num_batched_tokens,
            "enable_batching": enable_batching,
            "enable_position_interventions": enable_position_interventions,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            **vllm_kwargs,
        }
    )
    config = AutoConfig.from_pretrained(model_name)
    architecture = determine_architecture_from_hf_config(config)
    cfg = build_bridge_config_from_hf(config, architecture, model_name, dtype or torch.float32)
    adapter = ArchitectureAdapterFactory.select_architecture_adapter(cfg)
    url = client if client is not None else settings().values.get("redis")
    own = url is None
    pool = _started(model_name, engine, dtype, store) if own else Pool(_twin(url, served_as, store))
    try:
        card = pool.run(lambda connected: connected.card())
        if not own:
            _check_running(card, adapter.cfg, dtype, max_model_len, engine)
        adapter.cfg.dtype = getattr(torch, card.dtype)
        tokenizer = configure_tokenizer(tokenizer or AutoTokenizer.from_pretrained(model_name), adapter.cfg)
        components = adapter.component_mapping
        ending = Ending(Weights(model_name), components, adapter.cfg, adapter.cfg.dtype)
        driver = PoolDriver(pool, card, Tree.of(card, components), ending, adapter.cfg, tokenizer)
        return PoolBridge(adapter=adapter, tokenizer=tokenizer, driver=driver)
    except BaseException:
        pool.close()
        raise


def _engine(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments for the engine: those that were given, without those that a pool has no need of."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = given[name]
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise BadInput(name, f"must be a positive int; got {size!r}")
    if given.pop("disable_log_stats", True) is not True:
        raise BadInput("disable_log_stats", "a pool's engine forces disable_log_stats=True", "True")
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    given = {name: value for name, value in given.items() if value is not None and not (name in sizes and value == 1)}
    return {name: value for name, value in given.items() if name not in _OURS}


def _started(model: str, engine: dict[str, Any], dtype: torch.dtype | None, store: str | Path | None) -> Pool:
    """A pool of the bridge's own."""
    arguments = {"gpu_memory_utilization": 0.5, "max_num_batched_tokens": 2048, **engine}
    if dtype is not None:
        arguments["dtype"] = str(dtype).removeprefix("torch.")
    compiled = not arguments.pop("enforce_eager", True)
    return Pool(connect_local(model, store=store, engine=arguments, compiled=compiled))


def _twin(client: Any, served_as: str | None, store: str | Path | None) -> Client:
    """A connection of the bridge's own to the pool."""
    if isinstance(client, str):
        return Client(client, model=served_as, store=store)
    if not isinstance(client, (Client, SyncClient)):
        allowed = "a Redis URL or a client of lenspool; a tokenizer as tokenizer=..."
        raise BadInput("client", f"got {type(client).__name__}", allowed)
    if served_as is not None or store is not None:
        raise BadInput("client", "a client together with served_as or store", "the client's own settings")
    return client.twin()


def _check_running(
    card: ModelCard, cfg: Any, dtype: torch.dtype | None, max_model_len: int | None, engine: dict[str, Any]
) -> None:
    """Hold the arguments against a pool that runs already."""
    sizes = (card.n_layers, card.d_model, card.n_heads)
    if sizes != (cfg.n_layers, cfg.d_model, cfg.n_heads):
        reason = (
            f"{cfg.model_name} is not {card.name}, which the pool serves: layers, width and heads are {sizes} there"
        )
        raise BadInput("model_name", reason, "the served model's folder; served_as, where there are several")
    if dtype is not None and str(dtype).removeprefix("torch.") != card.dtype:
        raise BadInput("dtype", f"got {dtype}, and {card.name} is served in {card.dtype}")
    if max_model_len is not None and max_model_len > card.max_model_len:
        raise BadInput("max_model_len", f"got {max_model_len}", f"up to {card.max_model_len}, with which it is served")
    if noted := sorted(set(engine) - {"max_model_len"}):
        note = f"boot_pool: {', '.join(noted)} are said by whoever starts a pool's worker; this pool runs already"
        warnings.warn(note, UserWarning, stacklevel=4)
