"""A model on two processes, by tensor parallelism or as a pipeline, gives the rows that one process gives.

Heads and hidden layers are whole, edits of them too, and one process that dies takes the engine with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from lenspool.errors import EngineFailed
from lenspool_cache import Store
from tests.engine.asking import Asker, worst
from tests.engine.conftest import booted
from tests.engine.test_crashes import command, engine_processes, gone
from tests.families.reference import Edit, Reference

TOLERANCE = 1e-5
GENERATED = 5
OPTIONS = {"max_num_batched_tokens": 64, "max_num_seqs": 32}
LENGTHS = [3, 5, 9, 12, 17, 21, 26, 30, 33, 41, 48, 57, 63, 64, 65, 80, 130, 150]
EDITED = ["attn.hook_z", "attn.hook_k", "mlp.hook_post", "attn.hook_rot_q", "hook_resid_mid", "mlp.hook_pre_linear"]
LOGITS = [f"unembed.hook_out|{op}" for op in ("top_k(4).indices", "top_k(4).values", "entropy()")]
LENS = [f"blocks.{i}.hook_resid_{at}|lens.top_k(4).values" for i, at in ((0, "pre"), (1, "mid"), (3, "post"))]

Answers = list[tuple[list[int], dict[str, np.ndarray]]]


def prompts() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [[int(t) for t in random.integers(1, 1000, length)] for length in LENGTHS]


def edits_of(i: int, length: int, width: int, store: Store) -> tuple[list[dict[str, Any]], list[Edit]]:
    """Every third request is edited, at hooks of the first and of the last stage; and the same for the reference."""
    if i % 3:
        return [], []
    documents: list[dict[str, Any]] = []
    edits: list[Edit] = []
    for layer in (0, 3):
        part = EDITED[(i // 3 + layer) % len(EDITED)]
        size = {"attn.hook_k": width // 2, "mlp.hook_post": 2 * width, "mlp.hook_pre_linear": 2 * width}.get(
            part, width
        )
        vector = np.random.default_rng(i + layer).normal(0, 0.5, size).astype(np.float32)
        tensor = torch.from_numpy(vector)
        hook, ranges = f"blocks.{layer}.{part}", (1, length)
        document = {"hook": hook, "op": "add", "value": {"array": store.put_array(vector)}, "coefficient": 1.5}
        documents.append({**document, "ranges": [list(ranges)]})
        edits.append((hook, lambda rows, tensor=tensor: rows + 1.5 * tensor, ranges))  # type: ignore[misc]
    return documents, edits


async def ask(asker: Asker, store: Store, readouts: list[str]) -> Answers:
    """All requests at once, every other one a generation, over all hooks."""
    hooks = [*asker.hooks, *readouts]

    async def one(i: int, prompt: list[int]) -> tuple[list[int], dict[str, np.ndarray]]:
        await asyncio.sleep(0.01 * i)
        documents, _ = edits_of(i, len(prompt), 128, store)
        if i % 2:
            return [], await asker.capture(prompt, hooks, edits=documents)
        result, rows = await asker.generate(prompt, GENERATED, hooks, edits=documents)
        return result.token_ids, rows

    answers = await asyncio.wait_for(asyncio.gather(*(one(i, p) for i, p in enumerate(prompts()))), 300)
    stats = await asker.settled()
    assert stats["mixed_steps"] > 0 and stats["max_batch"] > 4
    return answers


def finite(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Scores that no query sees are the dtype's lowest number, whose norm is infinite: zero in both."""
    return {name: np.where(array < -1e30, 0, array) if "scores" in name else array for name, array in rows.items()}


@pytest_asyncio.fixture(scope="module")
async def single(tiny_llama: Path, store: Store) -> Answers:
    """What one process says."""
    async with booted(tiny_llama, store, **OPTIONS) as asker:
        return await ask(asker, store, [*LOGITS, *LENS])


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Reference:
    model = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32, attn_implementation="eager")
    return Reference(model.eval())


@pytest_asyncio.fixture(scope="module", params=["tensor_parallel_size", "pipeline_parallel_size"])
async def spread(request: pytest.FixtureRequest, tiny_llama: Path, store: Store) -> AsyncIterator[Asker]:
    """Two processes, a core each; vLLM would keep one of two for itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        async with booted(tiny_llama, store, **OPTIONS, **{request.param: 2}) as asker:
            yield asker


def lenses(asker: Asker) -> list[str]:
    """Readouts through the unembedding, where the engine has it beside the stream."""
    return LENS if asker.engine.info["numerics"]["pipeline_parallel"] == 1 else LENS[2:]


async def test_two_processes_are_as_one(spread: Asker, single: Answers, reference: Reference, store: Store) -> None:
    """Every hook, of prompts in chunks and generations, a third of them edited; and against transformers."""
    numerics = spread.engine.info["numerics"]
    assert numerics["tensor_parallel"] * numerics["pipeline_parallel"] == 2
    answers = await ask(spread, store, [*LOGITS, *lenses(spread)])
    errors, outer = [], []
    for i, ((tokens, rows), (alone, expected)) in enumerate(zip(answers, single, strict=True)):
        assert tokens == alone
        assert set(expected) - set(rows) <= set(LENS)
        assert np.array_equal(rows.pop(LOGITS[0]), expected[LOGITS[0]])
        errors.append(worst(finite(rows), finite(expected)))
        prompt = prompts()[i]
        computed = [*prompt, *tokens[:-1]]
        truth = reference.run(computed, edits_of(i, len(prompt), 128, store)[1])
        outer.append(worst(finite({n: rows[n] for n in truth if n in rows}), finite(truth)))
    print("\nagainst one process:", max(errors), "against transformers:", max(outer), "of", len(spread.hooks), "hooks")
    assert max(errors)[0] <= TOLERANCE
    assert max(outer)[0] <= TOLERANCE


async def test_hooks_are_those_of_one_process(spread: Asker, single: Answers) -> None:
    """In network order, none missing, none served twice, and each as wide as the whole model's."""
    names = [hook["name"] for hook in spread.engine.hooks]
    assert set(names) == {name for name in single[0][1] if "|" not in name} and len(names) == len(set(names))
    layers = [int(name.split(".")[1]) for name in names if name.startswith("blocks.")]
    assert layers == sorted(layers) and names[0] == "hook_embed" and names[-1] == "unembed.hook_out"
    widths = {hook["name"]: tuple(hook["dims"]) for hook in spread.engine.hooks}
    assert widths["blocks.2.attn.hook_z"] == (4, 32) and widths["blocks.2.attn.hook_k"] == (2, 32)
    assert widths["blocks.1.mlp.hook_post"] == (256,) and widths["blocks.0.attn.hook_result"] == (4, 128)
    reasons = spread.engine.refusals.values()
    assert not any("processes" in reason for reason in reasons), reasons


async def test_a_cancelled_request_leaves_the_others(spread: Asker, single: Answers) -> None:
    """Its rows are dropped in each process, at another time in each; what runs beside it is right."""
    long = [spread.request([1 + i, 2, 3], spread.hooks, generate=400) for i in range(6)]
    for k in range(4):
        running = [asyncio.create_task(spread.engine.run(request)) for request in long]
        beside = asyncio.create_task(spread.capture(prompts()[1], spread.hooks))
        await asyncio.sleep(0.03 * k)  # also before they have arrived
        for task in running:
            task.cancel()
        rows = await asyncio.wait_for(beside, 60)
        expected = {name: single[1][1][name] for name in rows}
        assert worst(finite(rows), finite(expected))[0] <= TOLERANCE
    await spread.settled()


async def test_one_process_that_dies_ends_the_engine(spread: Asker, store: Store) -> None:
    """Jobs may run elsewhere, soon; nothing that was written is taken for a whole answer. The last test: it kills."""
    mine = [p for p in engine_processes(spread) if "VLLM::Worker" in command(p)]
    assert len(mine) == 2
    requests = [spread.request([1 + i, 2, 3], ["blocks.2.hook_resid_post"], generate=480) for i in range(12)]
    running = [asyncio.create_task(spread.engine.run(request)) for request in requests]
    before = (await spread.engine.stats())["steps"]
    while (await spread.engine.stats())["steps"] < before + 20:
        await asyncio.sleep(0.05)
    began = time.monotonic()
    psutil.Process(max(p.pid for p in mine)).kill()
    outcomes = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 30)
    assert time.monotonic() - began < 15
    assert all(isinstance(o, EngineFailed) and o.requeue for o in outcomes), outcomes  # type: ignore[attr-defined]
    assert not spread.engine.alive
    assert not any("generation" in store.covered(request.run, ["generation"]) for request in requests)
    await spread.engine.stop()
    await gone(mine, 10)
