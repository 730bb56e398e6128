"""Requests that cannot be answered fail alone, at once and typed; cancelled ones leave nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lenspool.errors import InvalidJob, UnknownHook, UnsupportedHook
from lenspool_worker.requests import CaptureGroup, EngineRequest
from tests.engine.asking import Asker, relative

Prompts = Callable[[list[int]], list[list[int]]]
HOOK = "blocks.3.hook_resid_post"
LAST = "blocks.29.hook_resid_post"
WIDTH = 576


def bad_requests(engine: Asker, tokens: list[int]) -> list[tuple[str, EngineRequest, type[InvalidJob], str]]:
    """What is wrong, the request, and the error's type and field."""

    def edit(op: str, **fields: Any) -> dict[str, Any]:
        return {"hook": HOOK, "op": op, "ranges": [[0, 2]], **fields}

    def array(values: np.ndarray) -> dict[str, str]:
        return {"array": engine.store.put_array(values)}

    def ask(*edits: dict[str, Any], prompt: list[int] = tokens, **options: Any) -> EngineRequest:
        return engine.request(prompt, [LAST], edits=edits, **options)

    ones = np.ones(WIDTH, dtype=np.float32)
    value = "interventions[0].value"
    coefficient = "interventions[0].coefficient"
    nan = float("nan")
    poisoned = ones.copy()
    poisoned[7] = np.nan
    return [
        ("empty", ask(prompt=[], ranges=[(0, 1)]), InvalidJob, "prompt"),
        ("too long", ask(prompt=tokens * 200), InvalidJob, "prompt"),
        ("generates beyond the end", ask(generate=5000), InvalidJob, "prompt"),
        ("outside the vocabulary", ask(prompt=[*tokens, 49152]), InvalidJob, "prompt"),
        ("negative token", ask(prompt=[-1, *tokens]), InvalidJob, "prompt"),
        ("unknown hook", engine.request(tokens, ["blocks.99.hook_resid_post"]), UnknownHook, "captures"),
        ("unknown edited hook", ask({**edit("zero"), "hook": "nowhere"}), UnknownHook, "interventions[0].hook"),
        ("logits edited", ask({**edit("zero"), "hook": "unembed.hook_out"}), UnsupportedHook, "interventions[0].hook"),
        ("narrow direction", ask(edit("project_out", value=array(ones[:64]), coefficient=1.0)), InvalidJob, value),
        ("no rows", ask(edit("set", value={**array(ones[None]), "rows": [[1, 3]]})), InvalidJob, value),
        ("wrong width", ask(edit("add", value=array(ones[:-1]), coefficient=1.0)), InvalidJob, value),
        ("two-dimensional", ask(edit("set", value=array(ones[None]))), InvalidJob, value),
        ("wrong dtype", ask(edit("set", value=array(ones.astype(np.float64)))), InvalidJob, value),
        ("NaN", ask(edit("add", value=array(poisoned), coefficient=1.0)), InvalidJob, value),
        ("no such array", ask(edit("set", value={"array": "0" * 64})), InvalidJob, value),
        ("infinite factor", ask(edit("scale", factor=float("inf"))), InvalidJob, "interventions[0].factor"),
        ("NaN coefficient", ask(edit("add", value=1.0, coefficient=nan)), InvalidJob, coefficient),
        ("infinite number", ask(edit("set", value=float("-inf"))), InvalidJob, value),
        ("unknown op", ask(edit("rotate")), InvalidJob, "interventions[0].op"),
        ("beyond the prompt", ask(ranges=[(0, len(tokens) + 1)]), InvalidJob, "captures.ranges"),
        ("open range of a capture", ask(ranges=[(0, None)]), InvalidJob, "captures.ranges"),
        ("edits beyond the prompt", ask({**edit("zero"), "ranges": [[90, 91]]}), InvalidJob, "interventions[0].ranges"),
        ("range backwards", ask(ranges=[(5, 2)]), InvalidJob, "captures.ranges"),
    ]  # fmt: skip


async def test_bad_requests_among_good_ones(engine: Asker, prompts: Prompts) -> None:
    """Each fails typed within a second, and its neighbours are right."""
    good = prompts([9, 17, 33, 40, 21, 12])
    baseline = [await engine.capture(p, [HOOK, LAST]) for p in good]
    bad = bad_requests(engine, prompts([20])[0])
    took: dict[str, float] = {}

    async def fails(what: str, request: EngineRequest, kind: type[InvalidJob], field: str) -> None:
        began = time.monotonic()
        with pytest.raises(InvalidJob) as raised:
            await engine.engine.run(request)
        took[what] = time.monotonic() - began
        assert type(raised.value) is kind, what
        assert raised.value.field == field, what

    good_ones = asyncio.gather(*(engine.capture(p, [HOOK, LAST]) for p in good))
    await asyncio.sleep(0)
    await asyncio.gather(*(fails(*case) for case in bad))
    answers = await good_ones
    assert max(took.values()) < 1, took
    for rows, expected in zip(answers, baseline, strict=True):
        assert max(relative(rows[name], expected[name]) for name in rows) < 1e-5
    assert engine.engine.alive
    await engine.settled()


async def test_a_hundred_cancellations_leave_nothing(engine: Asker, prompts: Prompts) -> None:
    """At random times, with and without edits, captures and generations alike."""
    random = np.random.default_rng(0)
    made = prompts([int(n) for n in random.integers(4, 200, 100)])
    plain = prompts([31])[0]
    baseline = await engine.capture(plain, engine.hooks)
    before = await engine.settled()
    edit = {"hook": HOOK, "op": "scale", "factor": 3.0, "ranges": [[0, 2]]}

    async def one(i: int) -> bool:
        await asyncio.sleep(float(random.uniform(0, 2)))
        request = engine.request(made[i], [LAST], edits=[edit] * (i % 2), generate=[None, 40][i % 3 == 0])
        task = asyncio.create_task(engine.engine.run(request))
        await asyncio.sleep(float(random.uniform(0, 0.5)) * (i % 10 != 0))
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            assert not engine.store.covered(request.run, [LAST]) or i % 3  # a generation of 40 takes longer
            return True
        return False

    cancelled = sum(await asyncio.gather(*(one(i) for i in range(100))))
    assert cancelled > 50
    after = await engine.settled()
    assert after["live"] == after["tracked"] == after["held_bytes"] == before["held_bytes"] == 0
    assert not engine.engine._llm.output_processor.has_unfinished_requests()
    again = await engine.capture(plain, engine.hooks)
    assert all(np.array_equal(again[name], rows) for name, rows in baseline.items())


async def test_groups_may_share_hooks(engine: Asker, prompts: Prompts) -> None:
    prompt = prompts([30])[0]
    whole = (await engine.capture(prompt, [HOOK]))[HOOK]
    request = dataclasses.replace(
        engine.request(prompt, [HOOK]),
        captures=(CaptureGroup((HOOK, LAST), ((0, 5),)), CaptureGroup((HOOK,), ((3, 8), (20, 30)))),
    )
    result = await engine.engine.run(request)
    assert result.computed_rows == 5 + 18
    got = engine.store.rows(request.run, HOOK, [(0, 8), (20, 30)])
    assert relative(got, whole[[*range(8), *range(20, 30)]]) < 1e-6
