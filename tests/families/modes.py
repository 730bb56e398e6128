"""The modes in which every hook must have the same rows: what is asked for in each, and proof that it was that mode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.engine.asking import Asker
from tests.families.expected import EDITED, FACTOR, Expected, Run

_READ = ("blocks.1.hook_resid_post", "blocks.2.attn.hook_pattern", "unembed.hook_out")
_BLOCK = 32


@dataclass(frozen=True)
class Answer:
    """Rows of a request from position `start` on, and its generated tokens, beside transformers' run."""

    run: Run
    rows: dict[str, np.ndarray]
    generated: list[int]
    start: int = 0


@dataclass
class Outcome:
    """What a mode has answered.

    Attributes
    ----------
    edited
        Hook -> an answer after an edit there.
    met
        What shows that it was the mode that it is meant to be.
    """

    answers: list[Answer]
    edited: dict[str, Answer] = field(default_factory=dict)
    met: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Mode:
    """A way to run: in words, as options of vLLM's engine, and what is asked of it.

    Attributes
    ----------
    blocks
        Of the KV cache, for each group of layers that shares them; None for enough.
    """

    meaning: str
    options: dict[str, Any]
    ask: Callable[[Asker, Expected], Awaitable[Outcome]]
    blocks: int | None = None

    def options_for(self, expected: Expected) -> dict[str, Any]:
        """The options for one family's checkpoint."""
        if self.blocks is None:
            return self.options
        return {**self.options, "num_gpu_blocks_override": self.blocks * expected.cache_groups}


async def _answer(asker: Asker, run: Run, start: int = 0, hooks: list[str] | None = None) -> Answer:
    names = asker.hooks if hooks is None else hooks
    if not run.generated:
        return Answer(run, await asker.capture(run.prompt, names, ranges=[(start, len(run.prompt))]), [], start)
    result, rows = await asker.generate(run.prompt, len(run.generated), names, ranges=[(start, None)])
    return Answer(run, rows, result.token_ids, start)


async def _plain(asker: Asker, expected: Expected) -> Outcome:
    return Outcome(list(await asyncio.gather(*(_answer(asker, run) for run in expected.plain))))


async def _mixed(asker: Asker, expected: Expected) -> Outcome:
    """Prompts, edited prompts and a generation, in one batch."""

    async def edit(hook: str, run: Run) -> tuple[str, Answer]:
        value = {"array": asker.store.put_array(expected.vectors[hook])}
        document = {"hook": hook, "op": "add", "value": value, "coefficient": FACTOR, "ranges": [list(EDITED)]}
        hooks = sorted({*_READ, hook} & set(asker.hooks))
        return hook, Answer(run, await asker.capture(run.prompt, hooks, edits=[document]), [])

    answers, edits = await asyncio.gather(
        asyncio.gather(*(_answer(asker, run) for run in (*expected.plain, expected.continued[2]))),
        asyncio.gather(*(edit(hook, run) for hook, run in expected.edited.items() if hook in asker.hooks)),
    )
    stats = await asker.engine.stats()
    met = {name: stats[name] for name in ("steps", "max_batch", "mixed_steps")}
    assert met["max_batch"] > 1, met
    return Outcome(list(answers), dict(edits), met)


async def _chunked(asker: Asker, expected: Expected) -> Outcome:
    outcome = await _mixed(asker, expected)
    longest = max(len(run.prompt) for run in expected.plain)
    assert longest > asker.engine._options["max_num_batched_tokens"]
    assert outcome.met["mixed_steps"] > 0, outcome.met
    return outcome


async def _decode(asker: Asker, expected: Expected) -> Outcome:
    before = await asker.engine.stats()
    answers = await asyncio.gather(*(_answer(asker, run) for run in expected.continued))
    steps = (await asker.engine.stats())["steps"] - before["steps"]
    assert steps >= len(expected.continued[0].generated)
    return Outcome(list(answers), met={"steps": steps})


async def _preempted(asker: Asker, expected: Expected) -> Outcome:
    answers = await asyncio.gather(*(_answer(asker, run) for run in expected.crowd))
    preempted = (await asker.engine.stats())["preemptions"]
    assert preempted, "no request was preempted"
    return Outcome(list(answers), met={"preemptions": preempted})


async def _cached(asker: Asker, expected: Expected) -> Outcome:
    """A miss that fills the cache, a hit that wants no cached rows, and a capture that must not read the cache."""

    async def tokens() -> int:
        return (await asker.engine.stats())["tokens"]

    first, second = expected.sharing
    missed = await _answer(asker, first)
    before = await tokens()
    unread = [hook["name"] for hook in asker.engine.hooks if not hook["prefix"]]
    hit = await _answer(asker, second, len(second.prompt) - 1, unread)
    ran = await tokens() - before
    shared = len(second.prompt) + len(second.generated) - 1 - ran
    assert shared >= _BLOCK, f"the cache was not read: {ran} tokens were run"
    again = await _answer(asker, second)
    assert await tokens() - before - ran == len(second.prompt) + len(second.generated) - 1
    return Outcome([missed, hit, again], met={"cached_tokens": shared})


_SMALL = {
    "max_model_len": 128,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 64,
    "distributed_executor_backend": "uni",
}
MODES: dict[str, Mode] = {
    "eager": Mode("prompts, edited prompts and a generation in one batch", _SMALL, _mixed),
    "compiled": Mode("the same with torch.compile", {**_SMALL, "enforce_eager": False}, _mixed),
    "chunked": Mode(
        "the same, 16 tokens a step: longer prompts run in chunks, beside decodes",
        {**_SMALL, "max_num_batched_tokens": 16, "max_num_seqs": 16},
        _chunked,
    ),
    "decode": Mode("three generations of 12 tokens, captured over all steps", _SMALL, _decode),
    "preempted": Mode(
        "six generations of 16 tokens in a cache too small for them, so that some are thrown out and run again",
        {**_SMALL, "max_model_len": 64, "block_size": _BLOCK},
        _preempted,
        blocks=8,
    ),
    "prefix cache": Mode(
        "a miss, a hit of 64 tokens, and a capture of cached positions",
        {**_SMALL, "block_size": _BLOCK, "enable_prefix_caching": True},
        _cached,
    ),
    "bfloat16": Mode("prompts in one batch", {**_SMALL, "dtype": "bfloat16"}, _plain),
}
"""All but the last in float32."""
