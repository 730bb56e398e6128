"""The compiled model: the same rows, the same edits, and no graph from a cache that knows nothing of taps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from lenspool_cache import Store
from lenspool_worker import settings
from tests.engine.asking import Asker, Rows, worst
from tests.engine.conftest import booted
from tests.engine.edit_cases import OPS, Case, Cases, check, closed
from tests.engine.oracle import Oracle

TOLERANCE = 1e-5
OPTIONS = {"enforce_eager": False, "max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A compile cache of our own: what is compiled here is compiled now."""
    folder = tmp_path_factory.mktemp("compile-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(folder))
        yield folder


@pytest_asyncio.fixture(scope="module")
async def compiled(tiny_llama: Path, store: Store, compile_cache: Path) -> AsyncIterator[Asker]:
    async with booted(tiny_llama, store, kv_cache_memory_bytes=64 * 2**20, **OPTIONS) as asker:
        assert asker.engine.info["numerics"]["mode"] == "compiled"
        yield asker


@pytest.fixture(scope="module")
def tiny_oracle(tiny_llama: Path) -> Oracle:
    return Oracle(tiny_llama)


def random_prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(7)
    return [[int(t) for t in random.integers(1, 1000, 3 + 7 * i)] for i in range(count)]


async def test_every_hook_of_a_crowd_is_right(compiled: Asker, tiny_oracle: Oracle) -> None:
    """Chunks of 64 tokens, prefill and decode mixed."""
    wanted = random_prompts(18)

    async def one(i: int, prompt: list[int]) -> tuple[list[int], dict[str, np.ndarray]]:
        if i % 2:
            return [], await compiled.capture(prompt, tiny_oracle.hooks)
        result, rows = await compiled.generate(prompt, 8, tiny_oracle.hooks)
        return result.token_ids, rows

    answers = await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(wanted)))
    assert (await compiled.settled())["max_batch"] > 2
    errors = []
    for prompt, (generated, rows) in zip(wanted, answers, strict=True):
        expected = tiny_oracle.run([*prompt, *generated[:-1]])
        assert set(rows) == set(expected)
        errors.append(worst(rows, expected))
        greedy = expected["unembed.hook_out"].argmax(axis=1)[len(prompt) - 1 :].tolist()
        assert generated in (greedy, [])
    print("\ncompiled: worst relative error", max(errors))
    assert max(errors)[0] <= TOLERANCE


async def test_every_op_bites(compiled: Asker, store: Store, tiny_llama: Path) -> None:
    """Each op at another hook, over prompt and generated positions, all in one batch."""
    exact = Oracle(tiny_llama, torch.float64, inner=True)
    prompts, made = random_prompts(14)[2:], Cases(store, 5)
    hooks = [hook for hook in exact.hooks if hook.startswith(("blocks.1.", "hook_embed", "ln_final"))]
    cases: list[tuple[list[int], Case]] = []
    for k, op in enumerate(OPS * 2):
        prompt, hook = prompts[k % len(prompts)], hooks[k % len(hooks)]
        ranges = [(1, 3), (len(prompt), None)] if k % 2 else [(1, None)]
        width = 256 if hook.endswith("hook_post") and ".mlp." in hook else 128
        cases.append((prompt, made.make(op, hook, width, 1.0, closed(op, ranges, len(prompt)))))

    async def one(prompt: list[int], case: Case) -> tuple[list[int], Rows]:
        after = ["blocks.1.hook_resid_post", "blocks.2.hook_resid_post", "ln_final.hook_out"]
        result, rows = await compiled.generate(prompt, 4, sorted({case[0]["hook"], *after}), edits=[case[0]])
        return result.token_ids, rows

    answers = await asyncio.gather(*(one(*case) for case in cases))
    for (prompt, case), (tokens, rows) in zip(cases, answers, strict=True):
        check(prompt, tokens, rows, [case[1]], exact)


def test_the_taps_are_part_of_the_compile_key(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sets of taps never share a compiled graph, nor does one share with a model that has none.

    The key is all that can be tested here: on CPUs vLLM 0.32 never loads a graph that an earlier engine has left.
    """

    def key() -> str:
        return str(settings.engine_arguments(tiny_llama, OPTIONS).create_engine_config().compute_hash())

    ours = key()
    assert key() == ours
    monkeypatch.setattr(settings, "source_hash", lambda: "taps of another version")
    assert key() != ours
