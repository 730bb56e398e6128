"""A few-shot set: prompts of one long prefix and short tails, with reuse of prefixes and without.

`python benchmarks/prefix.py [prompts] [prefix tokens] [tail tokens]`

All prompts are asked for at once, of one hook in ten layers. Each way has its own random tokens, so that neither has
anything of the other's. What counts is tokens that the engine computed and bytes that the store wrote, against those
that are different.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import lenspool
from lenspool import Client
from lenspool_cache import Store
from lenspool_worker.demo_model import default_folder, prepare

HOOKS = [f"resid_post.{layer}" for layer in range(0, 30, 3)]
BLOCK = 32
"""Positions in a block of vLLM's prefix cache; on CPUs its default is 128, on GPUs 16."""


def few_shot(seed: int, prompts: int, prefix: int, tail: int) -> list[list[int]]:
    """Prompts of random tokens that are alike up to `prefix`."""
    random = np.random.default_rng(seed)
    shared = random.integers(1000, 40000, prefix).tolist()
    return [[*shared, *random.integers(1000, 40000, tail).tolist()] for _ in range(prompts)]


async def tokens_computed(client: Client) -> int:
    """The engine's counter, read after this call began."""
    began = time.time()
    while True:
        (row,) = await client.status()
        (worker,) = row["workers"]
        if worker.get("time", 0) > began:
            return int(worker["tokens"])
        await asyncio.sleep(0.1)


async def measure(client: Client, store: Path, prompts: list[list[int]], **options: str) -> tuple[int, int, float]:
    """Tokens computed, bytes stored, and seconds."""
    tokens, size = await tokens_computed(client), payload(store)
    began = time.perf_counter()
    async for _ in client.map(prompts, HOOKS, concurrency=len(prompts), **options):
        pass
    seconds = time.perf_counter() - began
    return await tokens_computed(client) - tokens, payload(store) - size, seconds


def payload(store: Path) -> int:
    """Bytes of rows in a store."""
    with Store(store, read_only=True) as opened:
        return int(opened.stats()["payload_bytes"])


async def main(count: int = 40, prefix: int = 800, tail: int = 50) -> None:
    """Measure and print a table."""
    unique = prefix + count * tail
    with tempfile.TemporaryDirectory() as folder:
        store, model = Path(folder) / "store", prepare(default_folder())
        async with lenspool.connect_local(model, store=store, engine={"block_size": BLOCK}) as client:
            card = await client.card()
            row_bytes = len(HOOKS) * card.d_model * (2 if card.dtype in ("bfloat16", "float16") else 4)
            await client.capture(few_shot(0, 1, 64, 8)[0], HOOKS)  # the first steps are slower
            found = {}
            for seed, reuse in enumerate(("prefix", "none"), 1):
                found[reuse] = await measure(client, store, few_shot(seed, count, prefix, tail), reuse=reuse)
    print(f"{count} prompts of {prefix} + {tail} tokens: {unique} of {count * (prefix + tail)} are different")
    print(f"{'reuse':8} {'tokens/unique':>14} {'bytes/unique':>14} {'seconds':>9} {'to none':>9}")
    for reuse, (tokens, size, seconds) in found.items():
        ratio = seconds / found["none"][2]
        print(f"{reuse:8} {tokens / unique:14.2f} {size / (unique * row_bytes):14.2f} {seconds:9.2f} {ratio:9.2f}")


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
