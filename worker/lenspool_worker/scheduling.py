"""vLLM's scheduler, with a prefix cache that knows of edits: what `scheduler_cls` names, in vLLM's EngineCore process.

An edit changes keys and values at its own positions and behind them, never before. So each KV block is keyed by the
edits within it: keys are chained, so two runs share exactly the blocks in front of the first edit in which they differ.
A sweep of patches over one long prompt shares all of it up to each patch, with plain runs, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from lenspool_cache.keys import canonical_json
from lenspool_worker.instrument import SPEC

_plain_keys = kv_cache_utils.generate_block_hash_extra_keys


def edit_key(edits: Iterable[Mapping[str, Any]], start: int, stop: int) -> str | None:
    """Hash of what some edits do to positions `[start, stop)`; None when it is nothing."""
    here = []
    for document in edits:
        own_rows = isinstance(document.get("value"), dict) and "rows" in document["value"]
        before, parts = 0, []
        for low, high in document["ranges"]:
            a, b = max(low, start), stop if high is None else min(high, stop)
            if a < b:
                parts.append([a, b, *([before + a - low] if own_rows else [])])  # the place says which rows it takes
            before += 0 if high is None else high - low
        if parts:
            here.append({**document, "ranges": parts})
    return hashlib.sha256(canonical_json(here)).hexdigest() if here else None


def _keys_with_edits(request: Any, start: int, stop: int, start_mm_idx: int) -> tuple[tuple[Any, ...] | None, int]:
    keys, following = _plain_keys(request, start, stop, start_mm_idx)
    params = request.sampling_params
    spec = (params.extra_args or {}).get(SPEC) if params is not None else None
    key = edit_key(spec["interventions"], start, stop) if spec else None
    if spec and key is not None:  # an epoch ends with an edit that fails, as its blocks are not what its key says
        keys = (*(keys or ()), ("lenspool", f"{spec.get('epoch', 0)} {key}"))
    return keys, following


def scheduler(**options: Any) -> Scheduler:
    """The scheduler that vLLM would take, in a process whose block keys know of edits."""
    kv_cache_utils.generate_block_hash_extra_keys = _keys_with_edits
    kind = AsyncScheduler if options["vllm_config"].scheduler_config.async_scheduling else Scheduler
    return kind(**options)
