"""A plan counts what a pool would compute and store: against a store into which all is really put, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lenspool.access import StoreAccess
from lenspool.card import ModelCard
from lenspool.job import Request, closed
from lenspool.plan import Plan, Tally
from lenspool_cache import Store

POST, EMBED = "blocks.1.hook_resid_post", "hook_embed"
SHOTS = [i % 90 for i in range(32)]


def request(card: ModelCard, tokens: list[int], hooks: list[str], **more: Any) -> Request:
    return Request(card, tokens, hooks, more.pop("ranges", [(0, len(tokens))]), [], {}, **more)


async def planned(store: Store, requests: list[Request]) -> Plan:
    tally = Tally(StoreAccess(store))
    for one in requests:
        await tally.add(one)
    return tally.plan(None)


def run_all(store: Store, requests: list[Request]) -> tuple[int, int]:
    """What is computed and stored: prompts, and bytes."""
    ran = written = 0
    for one in requests:
        wanted = {name: closed(one.ranges_of(name), len(one.tokens)) for name in one.hooks}
        missing = store.missing(one.run, wanted)
        ran += bool(missing)
        width = {name: one.card.hooks[name].width for name in missing}
        rows = {n: [(s, np.zeros((e - s, width[n]), np.float32)) for s, e in gaps] for n, gaps in missing.items()}
        written += store.put(one.run, rows) if rows else 0
    return ran, written


@pytest.mark.parametrize("positions", ["all", "last"])
async def test_a_shared_prefix_counts_once(card: ModelCard, tmp_path: Path, positions: str) -> None:
    prompts = [[*SHOTS, *[90 + i] * 8] for i in range(5)]
    prompts += [SHOTS[:16], [*SHOTS[:16], *[99] * 4], [98] * 20, prompts[0]]
    ranges = {} if positions == "all" else {"ranges": [(len(prompts[0]) - 1, len(prompts[0]))]}
    if ranges:
        prompts = [p for p in prompts if len(p) == len(prompts[0])]
    requests = [request(card, tokens, [POST, EMBED], **ranges) for tokens in prompts]
    with Store(tmp_path / "store") as store:
        plan = await planned(store, requests)
        ran, written = run_all(store, requests)
        assert (plan.misses, plan.bytes) == (ran, written)
        shared = 40 + 4 * 8  # the first one's whole, and the others' ends
        assert plan.tokens == shared + (4 + 20 if positions == "all" else 0)
        assert (plan.hits, plan.repeats) == (0, 2 if positions == "all" else 1)
        after = await planned(store, requests)
        assert (after.hits, after.tokens, after.bytes) == (len(prompts), 0, 0)


async def test_what_stands_alone_counts_whole(card: ModelCard, tmp_path: Path) -> None:
    prompts = [[*SHOTS, *[90 + i] * 8] for i in range(3)]
    alone = [request(card, tokens, [POST], reuse="none") for tokens in prompts]
    with Store(tmp_path / "store") as store:
        plan = await planned(store, alone)
        assert (plan.misses, plan.tokens, plan.bytes) == (3, 120, run_all(store, alone)[1])
        other = [request(card, prompts[0], [POST]), request(card, prompts[1], [EMBED])]
        plan = await planned(store, other)  # of another hook all rows are missing, so the prompt is computed again
        assert (plan.tokens, plan.bytes) == (80, run_all(store, other)[1])
        rest = [request(card, [*SHOTS, 5, 5], [POST, EMBED])]
        assert (await planned(store, rest)).tokens == 34, "the engine may have forgotten what was before"
