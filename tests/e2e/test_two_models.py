"""Two models in one pool, one of whose workers has a small byte budget."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from lenspool import Client, keys
from lenspool.broker import Broker
from tests.e2e.test_life import broker, served, tiny, worker  # noqa: F401


async def test_each_client_gets_its_model_and_the_budget_is_kept(
    tiny: Path,  # noqa: F811
    broker: Broker,  # noqa: F811
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    prompts = [[5, i, *range(1, 199)] for i in range(30)]  # 200 x 1000 logits in float32: 800 kB each
    with (
        worker(tiny, broker.url, store, "--name", "one", "--held-bytes", "1000000"),
        worker(tiny, broker.url, store, "--name", "two", "--per-client", "4"),
    ):
        async with Client(broker.url, model="one") as one, Client(broker.url, model="two") as two:
            await served(one, 2)
            assert [card.name for card in await one.models()] == ["one", "two"]
            budgeted, free = await asyncio.wait_for(
                asyncio.gather(
                    asyncio.gather(*(one.capture(prompt, "logits") for prompt in prompts)),
                    asyncio.gather(*(two.capture(prompt, "resid_post.1") for prompt in prompts)),
                ),
                120,
            )
            assert all(capture["logits"].shape == (200, 1000) for capture in budgeted)
            assert len({np.float64(capture["logits"][1]).sum() for capture in budgeted}) == len(prompts)
            assert all(capture["resid_post.1"].shape == (200, 128) for capture in free)
            await asyncio.sleep(2.0)  # counters are read each second
            stats = {row["model"].split("@")[0]: row["workers"][0] for row in await one.status()}
            assert stats["one"]["max_batch"] == 1
            assert 1 < stats["two"]["max_batch"] <= 4
            assert await one._queue.redis.zcard(keys.CARDS) == 2
