"""Prompts that begin alike share rows, in the store and in the engine; what they give is what each gives alone."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lenspool import Capture, Client, InvalidJob, add, scale, zero
from lenspool.readouts import loss, top_k
from lenspool_cache import Store, evict
from tests.e2e.conftest import counters, relative

POST = "blocks.11.hook_resid_post"
TOLERANCE = 1e-5
BLOCK = 128
"""Positions in a block of vLLM's prefix cache on CPUs."""


def some_tokens(random: np.random.Generator, count: int) -> list[int]:
    return random.integers(1000, 40000, count).tolist()


def payload(store: Path) -> int:
    with Store(store, read_only=True) as opened:
        return int(opened.stats()["payload_bytes"])


def assert_equal(got: Capture, expected: Capture) -> None:
    assert got.token_ids == expected.token_ids
    assert got.positions.tolist() == expected.positions.tolist()
    for name in expected:
        one, other = got[name], expected[name]
        if hasattr(one, "indices"):
            assert relative(one.values, other.values) <= TOLERANCE
        elif not other.any():
            assert not one.any() and one.shape == other.shape
        else:
            assert relative(one, other) <= TOLERANCE, name


async def test_a_shared_prefix_is_computed_and_stored_once(client: Client, store: Path) -> None:
    """Sixteen prompts at once: the first computes what they share, the others wait for it, and no more."""
    random = np.random.default_rng(1)
    shared = some_tokens(random, 2 * BLOCK)
    prompts = [[*shared, *some_tokens(random, 12)] for _ in range(16)]
    unique = 2 * BLOCK + 16 * 12
    before, stored = await counters(client), payload(store)
    async with asyncio.timeout(120):
        results = await asyncio.gather(*(client.capture(prompt, [POST, "attn_out.20"]) for prompt in prompts))
    after = await counters(client)
    assert after["tokens"] - before["tokens"] <= 1.1 * unique
    assert payload(store) - stored == unique * 2 * 576 * 4
    rows = [r.provenance["prefix_rows"] for r in results]
    assert sorted(rows) == [0] + [2 * 2 * BLOCK] * 15
    assert sum(r.provenance["computed_rows"] for r in results) == 2 * unique
    for result in (results[0], results[-1]):
        assert_equal(result, await client.capture(result.token_ids, [POST, "attn_out.20"], reuse="none"))
    again = await client.capture(prompts[3], [POST, "attn_out.20"])
    assert again.cached and again[POST].tobytes() == results[3][POST].tobytes()


async def test_of_a_prefix_only_what_is_missing_is_run(client: Client) -> None:
    """Another hook needs all positions; the last row of the same hooks none that are there."""
    random = np.random.default_rng(2)
    prompt = some_tokens(random, BLOCK + 20)
    await client.capture(prompt, POST)
    other = await client.capture([*prompt, 7], [POST, "resid_post.3"])
    assert other.provenance["computed_rows"] == len(prompt) + 2
    before = await counters(client)
    grown = await client.capture([*prompt, 7, 8], [POST, "resid_post.3"], positions=[3, -1])
    assert (await counters(client))["tokens"] - before["tokens"] == len(prompt) + 2 - BLOCK
    assert grown.provenance["computed_rows"] == 2 and grown.provenance["prefix_rows"] == 2
    shorter = await client.capture(prompt[:40], [POST, "resid_post.3"])
    assert shorter.cached and shorter.provenance["prefix_rows"] == 80
    assert_equal(grown, await client.capture([*prompt, 7, 8], [POST, "resid_post.3"], positions=[3, -1], reuse="none"))


async def test_without_reuse_nothing_is_taken(client: Client) -> None:
    random = np.random.default_rng(3)
    prompt = some_tokens(random, BLOCK + 20)
    await client.capture(prompt, POST)
    before = await counters(client)
    fresh = await client.capture(prompt, POST, reuse="none")
    assert (await counters(client))["tokens"] - before["tokens"] == len(prompt)
    assert fresh.provenance["reuse"] == "none" and fresh.provenance["computed_rows"] == len(prompt)
    assert fresh.provenance["prefix_rows"] == 0
    again = await client.capture(prompt, POST, reuse="none")
    assert again.cached and again[POST].tobytes() == fresh[POST].tobytes()
    with pytest.raises(InvalidJob, match="'prefix', 'none'"):
        await client.capture(prompt, POST, reuse="some")  # type: ignore[arg-type]
    assert (await client.with_options(reuse="none").capture(prompt, POST)).provenance["reuse"] == "none"
    job = await client.submit_capture([*prompt, 5], POST, reuse="none")
    assert (await client.job(job.id).result(60)).provenance["reuse"] == "none"


async def test_a_generation_takes_rows_of_its_prompt_and_gives_them(client: Client) -> None:
    random = np.random.default_rng(4)
    prompt = some_tokens(random, 40)
    capture = await client.capture(prompt, POST)
    made = await client.generate(prompt, hooks=[POST], max_tokens=4, ignore_eos=True)
    assert made.provenance["prefix_rows"] == 40 and made.provenance["computed_rows"] == 3
    assert made[POST][:40].tobytes() == capture[POST].tobytes()
    alone = await client.generate(prompt, hooks=[POST], max_tokens=4, ignore_eos=True, reuse="none")
    assert alone.sequence == made.sequence
    assert relative(made[POST], alone[POST]) <= TOLERANCE
    longer = [*some_tokens(random, 30), 5]
    await client.generate(longer, hooks=[POST], max_tokens=2, ignore_eos=True)
    assert (await client.capture(longer, POST)).cached


def requests(random: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Calls over a tree of prompts: any hooks, any positions, any edits."""
    trunk = some_tokens(random, 150)
    branches = [some_tokens(random, 60) for _ in range(3)]
    vector = random.normal(0, 5, 576).astype(np.float32)
    edits = [
        (),
        (),
        add("resid_post.3", vector, positions=slice(40, None)),
        add("resid_post.3", vector, positions=slice(40, 90)),
        [scale("mlp_out.7", 0.5, positions=[20, 100]), zero("attn_out.9", positions=-1)],
    ]
    hooks = [[POST], [POST, "resid_post.3"], ["attn_out.9", top_k("logits", 3)], [POST, loss()], ["pattern.2", POST]]
    positions = ["all", "all", "last", [5, 30, -2], slice(10, 40)]
    out = []
    for _ in range(count):
        cut = int(random.integers(20, 150))
        prompt = [*trunk[:cut], *branches[random.integers(3)][: random.integers(1, 60)]]
        if random.random() < 0.5:
            prompt = [*trunk, *branches[random.integers(3)][: random.integers(1, 60)]]
        if len(prompt) <= 101:
            prompt = [*trunk, *prompt]
        chosen = hooks[random.integers(len(hooks))]
        where = positions[random.integers(len(positions))]
        out.append(
            {
                "prompt": prompt,
                "hooks": chosen,
                "positions": "all" if loss() in chosen else where,
                "interventions": edits[random.integers(len(edits))],
            }
        )
    return out


async def test_every_result_equals_its_solo_run(client: Client, store: Path) -> None:
    """In any order, at once, with rows evicted in between."""
    random = np.random.default_rng(5)
    calls, results = requests(random, 18), []
    reused = 0
    with Store(store) as opened:
        for start in range(0, len(calls), 6):
            async with asyncio.timeout(240):
                some = await asyncio.gather(*(client.capture(**call) for call in calls[start : start + 6]))
            for result in some:
                for name in result:
                    result[name]  # now, before it is evicted
                reused += result.provenance["prefix_rows"]
            results += some
            keys = [key for r in some for key in (*r.provenance["keys"].values(), *r.provenance["prefix_keys"])]
            evict(opened, [bytes.fromhex(key) for key in random.choice(keys, 5)])
    assert reused > 300
    for call, result in zip(calls, results, strict=True):
        assert_equal(result, await client.capture(**call, reuse="none"))


async def test_a_model_whose_rows_are_not_causal_shares_none(client: Client) -> None:
    """The card says why; every request is then one that takes nothing."""
    card = await client.card()
    assert card.no_prefix_reuse == ""
    ready = client._shared.ready
    assert ready is not None
    client._shared.ready = dataclasses.replace(card, no_prefix_reuse="its attention is bidirectional"), ready[1]
    try:
        _, request = await client._request([5] * 20, POST, {})
    finally:
        client._shared.ready = ready
    assert request.reuse == "none" and request.document(request.whole)["reuse"] == "none"
