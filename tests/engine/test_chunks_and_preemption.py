"""64 tokens a step, and a KV cache too small for the crowd: positions are absolute, and replays leave no trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from lenspool_cache import Store
from tests.engine.asking import Asker, Prompts, Rows, relative, worst
from tests.engine.conftest import booted
from tests.engine.edit_cases import OPS, Case, Cases, check, closed
from tests.engine.oracle import Oracle
from tests.engine.test_sampling import asked, check_logprobs, check_prompt

BUDGET = 64
GENERATED = 20
TOLERANCE = 1e-5
HOOKS = ["hook_embed", "ln_final.hook_out", "unembed.hook_out"]
HOOKS += [
    f"blocks.{i}.hook_{at}"
    for i in (0, 11, 29)
    for at in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
]


@pytest_asyncio.fixture(scope="module")
async def tight(smollm2: Path, store: Store) -> AsyncIterator[Asker]:
    """64 tokens a step; 18 blocks of 32 tokens."""
    options = {"max_model_len": 512, "max_num_batched_tokens": BUDGET, "max_num_seqs": 32}
    async with booted(smollm2, store, block_size=32, num_gpu_blocks_override=18, **options) as asker:
        yield asker


async def test_preempted_generations_keep_their_rows(tight: Asker, oracle: Oracle, prompts: Prompts) -> None:
    """More requests than the cache holds: some are thrown out half-way and computed again."""
    lengths = [20, 27, 30, 31, 33, 47, 60, 62, 63, 64, 65, 90, 93, 94, 120, 129]
    wanted = prompts(lengths)
    before = await tight.settled()

    async def one(turn: int, prompt: list[int]) -> tuple[list[int], dict[str, np.ndarray]]:
        await asyncio.sleep(0.02 * turn)
        if turn % 5 == 4:
            return [], await tight.capture(prompt, HOOKS)
        result, rows = await tight.generate(prompt, GENERATED, HOOKS)
        return result.token_ids, rows

    answers = await asyncio.gather(*(one(turn, prompt) for turn, prompt in enumerate(wanted)))
    after = await tight.settled()
    assert after["preemptions"] > before["preemptions"]
    assert after["mixed_steps"] > before["mixed_steps"]
    errors = []
    for prompt, (generated, rows) in zip(wanted, answers, strict=True):
        computed = [*prompt, *generated[:-1]]
        expected = oracle.run(computed)
        assert all(len(r) == len(computed) for r in rows.values())
        errors.append(worst(rows, {name: expected[name] for name in HOOKS}))
        greedy = expected["unembed.hook_out"].argmax(axis=1)[len(prompt) - 1 :].tolist()
        assert generated in (greedy, [])
    print("\npreempted:", after["preemptions"] - before["preemptions"], "worst relative error", max(errors))
    assert max(errors)[0] <= TOLERANCE


async def test_preempted_edits_apply_again(tight: Asker, store: Store, smollm2: Path, prompts: Prompts) -> None:
    """Every op, over chunks, prompt and generated positions, holds when its request is computed a second time."""
    exact = Oracle(smollm2, torch.float64, inner=True)
    made, before = Cases(store, 6), await tight.settled()
    cases: list[tuple[list[int], Case]] = []
    for k, (op, prompt) in enumerate(
        zip(OPS, prompts([61, 30, 62, 94, 63, 94, 129, 31, 60, 59, 65, 33, 70, 90]), strict=True)
    ):
        start = [1, 5, len(prompt) - 1, len(prompt), len(prompt) + 3][k % 5]
        hook = ["blocks.11.hook_resid_post", "blocks.11.attn.hook_z"][k % 2]
        ranges = closed(op, [(min(start, 5) if op == "rows" else start, None)], len(prompt))
        cases.append((prompt, made.make(op, hook, 576, 10.0 / (1 + 9 * (k % 2)), ranges)))

    async def one(prompt: list[int], case: Case) -> tuple[list[int], Rows]:
        hooks = ["blocks.11.attn.hook_z", "blocks.11.hook_resid_post", "blocks.20.hook_resid_post"]
        result, rows = await tight.generate(prompt, GENERATED, hooks, edits=[case[0]])
        return result.token_ids, rows

    answers = await asyncio.gather(*(one(*case) for case in cases))
    assert (await tight.settled())["preemptions"] > before["preemptions"]
    for (prompt, case), (tokens, rows) in zip(cases, answers, strict=True):
        check(prompt, tokens, rows, [case[1]], exact)


async def test_log_probabilities_over_chunks_and_preemptions(tight: Asker, oracle: Oracle, prompts: Prompts) -> None:
    for length in (64, 65, 129, 300):
        await check_prompt(tight, oracle, prompts([length])[0])
    before = await tight.settled()
    crowd = prompts([20, 27, 30, 31, 33, 47, 60, 62, 63, 64, 65, 90, 93, 94, 120, 129])
    made = await asyncio.gather(*(asked(tight, prompt, 20, logprobs=3, prompt_logprobs=3) for prompt in crowd))
    assert (await tight.settled())["preemptions"] > before["preemptions"]
    for prompt, got in zip(crowd, made, strict=True):
        logits = oracle.run([*prompt, *got["token_ids"][:-1]])["unembed.hook_out"]
        check_logprobs(got["prompt_logprobs"], logits[: len(prompt) - 1], prompt[1:], 3)
        check_logprobs(got["logprobs"], logits[len(prompt) - 1 :], got["token_ids"], 3)


@pytest.mark.parametrize("length", [BUDGET - 1, BUDGET, BUDGET + 1, 2 * BUDGET + 1, 3 * BUDGET + 1, 400])
async def test_chunks_of_a_prompt_join(tight: Asker, oracle: Oracle, prompts: Prompts, length: int) -> None:
    """Also with a last chunk of one token, and prompts many times longer than a step."""
    (prompt,) = prompts([length])
    before = await tight.settled()
    rows = await tight.capture(prompt, HOOKS)
    steps = (await tight.settled())["steps"] - before["steps"]
    assert steps == -(-length // BUDGET)
    assert worst(rows, oracle.run(prompt))[0] <= TOLERANCE


async def test_an_edit_is_where_it_was_asked_for(tight: Asker, store: Store, oracle: Oracle, prompts: Prompts) -> None:
    """Positions in each chunk and across their borders; position 3 is not also 67 and 131."""
    (prompt,) = prompts([3 * BUDGET + 1])
    hook = "blocks.4.hook_resid_mid"
    vector = np.random.default_rng(4).normal(0, 5, 576).astype(np.float32)
    value = {"array": store.put_array(vector)}
    plain = await tight.capture(prompt, [hook])
    for ranges in ([(3, 4)], [(100, 103)], [(60, 70)], [(127, 129), (192, 193)]):
        wire = [list(r) for r in ranges]
        edit = {"hook": hook, "op": "add", "value": value, "coefficient": 1.0, "ranges": wire}
        rows = await tight.capture(prompt, [*HOOKS, hook], edits=[edit])
        expected = oracle.run(prompt, [(hook, lambda x: x + torch.from_numpy(vector), ranges)])
        assert worst(rows, expected)[0] <= TOLERANCE
        moved = np.flatnonzero(np.abs(rows[hook] - plain[hook]).max(axis=1) > 1.0).tolist()
        assert moved == [p for a, b in ranges for p in range(a, b)]


async def test_single_positions_of_a_long_prompt(tight: Asker, oracle: Oracle, prompts: Prompts) -> None:
    (prompt,) = prompts([3 * BUDGET + 1])
    expected = oracle.run(prompt)
    for ranges in ([(64, 65)], [(63, 65), (128, 129)], [(192, 193)]):
        rows = await tight.capture(prompt, HOOKS, ranges=ranges)
        for name, got in rows.items():
            assert relative(got, np.concatenate([expected[name][a:b] for a, b in ranges])) <= TOLERANCE
