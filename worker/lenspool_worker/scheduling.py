"""vLLM's scheduler, with a prefix cache that knows of edits: what `scheduler_cls` names, in vLLM's EngineCore process.

An edit changes keys and values at its own positions and behind them, never before. So each KV block is keyed by the
edits within it: keys are chained, so two runs share exactly the blocks in front of the first edit in which they differ.
A sweep of patches over one long prompt shares all of it up to each patch, with plain runs, too.

A request reads the cache up to the first row that it has to yield, since cached positions are not run.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from lenspool_cache.keys import canonical_json
from lenspool_cache.prefix import edits_within
from lenspool_worker.instrument import SPEC
from lenspool_worker.leaving import leave

_plain_keys = kv_cache_utils.generate_block_hash_extra_keys


def edit_key(edits: Iterable[Mapping[str, Any]], start: int, stop: int) -> str | None:
    """Hash of what some edits do to positions `[start, stop)`; None when it is nothing."""
    here = edits_within(edits, start, stop)
    return hashlib.sha256(canonical_json(here)).hexdigest() if here else None


def _spec(request: Any) -> Mapping[str, Any] | None:
    params = request.sampling_params
    return (params.extra_args or {}).get(SPEC) if params is not None else None


def _keys_with_edits(request: Any, start: int, stop: int, start_mm_idx: int) -> tuple[tuple[Any, ...] | None, int]:
    keys, following = _plain_keys(request, start, stop, start_mm_idx)
    spec = _spec(request)
    key = edit_key(spec["interventions"], start, stop) if spec else None
    if spec and key is not None:  # an epoch ends with an edit that fails, as its blocks are not what its key says
        keys = (*(keys or ()), ("lenspool", f"{spec.get('epoch', 0)} {key}"))
    return keys, following


def _read_less(manager: Any) -> None:
    """Have vLLM's `KVCacheManager` look for cached blocks only in front of a request's first wanted row."""
    read, find, most = manager.get_computed_blocks, manager.coordinator.find_longest_cache_hit, sys.maxsize

    def get_computed_blocks(request: Any) -> Any:
        nonlocal most
        first = (_spec(request) or {}).get("first")
        most = sys.maxsize if first is None else first
        return read(request)

    manager.coordinator.find_longest_cache_hit = lambda hashes, longest: find(hashes, min(longest, most))
    manager.get_computed_blocks = get_computed_blocks


def scheduler(**options: Any) -> Scheduler:
    """The scheduler that vLLM would take, in a process whose prefix cache knows of edits and of rows."""
    kv_cache_utils.generate_block_hash_extra_keys = _keys_with_edits
    kind = AsyncScheduler if options["vllm_config"].scheduler_config.async_scheduling else Scheduler
    made = kind(**options)
    _read_less(made.kv_cache_manager)
    end = made.shutdown

    def shutdown() -> None:
        end()
        leave()  # workers and queues are gone before the scheduler

    made.shutdown = shutdown
    return made
