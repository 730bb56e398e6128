"""What a capture costs: `make bench`.

One run, side by side, on SmolLM2-135M in float32: the same prompts through Hugging Face transformers one at a time (as
a script does by itself), through the engine without any capture (the floor), through the engine with captures, through
a whole pool, and through the pool again, from the store. The ratios count; absolute times are this machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import lenspool
from lenspool.errors import LenspoolError
from lenspool_cache import Run, Store
from lenspool_worker.demo_model import default_folder, prepare
from lenspool_worker.engine import Engine
from lenspool_worker.requests import CaptureGroup, EngineRequest

LAYERS = 30
ENGINE: dict[str, Any] = {"max_model_len": 1024}


def prompts(count: int, length: int, salt: int) -> list[list[int]]:
    """Token ids, different in each round so that nothing is reused by accident."""
    return [[(7919 * (salt + 1) + 31 * i + 17 * j) % 49000 + 10 for j in range(length)] for i in range(count)]


def transformers_one_by_one(model: Path) -> Callable[[list[list[int]]], Awaitable[None]]:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    async def run(batch: list[list[int]]) -> None:
        with torch.no_grad():
            for tokens in batch:
                loaded(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)

    return run


def through_engine(engine: Engine, hooks: tuple[str, ...]) -> Callable[[list[list[int]]], Awaitable[None]]:
    async def one(tokens: list[int]) -> None:
        captures = (CaptureGroup(hooks, ((0, len(tokens)),)),) if hooks else ()
        run = Run({"tokens": tokens, "hooks": list(hooks)})
        await engine.run(EngineRequest("bench", tokens, captures, [], None, run))

    async def run(batch: list[list[int]]) -> None:
        await asyncio.gather(*(one(tokens) for tokens in batch))

    return run


def through_pool(client: lenspool.Client, hooks: tuple[str, ...]) -> Callable[[list[list[int]]], Awaitable[None]]:
    async def run(batch: list[list[int]]) -> None:
        async for result in client.map(batch, hooks):
            for name in result:
                result[name]

    return run


async def measure(
    ways: dict[str, Callable[[list[list[int]]], Awaitable[None]]], count: int, length: int, rounds: int, first: int
) -> dict[str, list[float]]:
    """Seconds of each way in each round; the ways take turns, so that a busy moment hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for k in range(rounds + 1):
        for name, way in ways.items():
            batch = prompts(count, length, first + k)
            began = time.perf_counter()
            await way(batch)
            if k > 0:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    return seconds


async def main(count: int, length: int, rounds: int) -> None:
    model = prepare(default_folder())
    every = tuple(f"blocks.{i}.hook_resid_post" for i in range(LAYERS))
    one = (every[15],)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with Store(Path(folder) / "engine") as store:
            engine = Engine(str(model), store, ENGINE)
            await engine.start()
            try:
                ways = {
                    "transformers, one at a time, all layers": transformers_one_by_one(model),
                    "engine, no capture": through_engine(engine, ()),
                    "engine, 1 layer": through_engine(engine, one),
                    f"engine, {LAYERS} layers": through_engine(engine, every),
                }
                seconds |= await measure(ways, count, length, rounds, 0)
            finally:
                await engine.stop()
        async with lenspool.connect_local(model, store=Path(folder) / "pool", engine=ENGINE) as client:
            ways = {
                "pool, 1 layer": through_pool(client, one),
                f"pool, {LAYERS} layers": through_pool(client, every),
                f"pool, {LAYERS} layers, from the store": through_pool(client, every),
            }
            seconds |= await measure(ways, count, length, rounds, 100)
    table = Table(title=f"{count} prompts x {length} tokens, median of {rounds} rounds")
    for column in ("way", "seconds", "prompts/s", "time / engine without capture"):
        table.add_column(column, justify="left" if column == "way" else "right")
    middle = {name: sorted(times)[len(times) // 2] for name, times in seconds.items()}
    for name, value in middle.items():
        table.add_row(name, f"{value:.2f}", f"{count / value:.1f}", f"{value / middle['engine, no capture']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    try:
        asyncio.run(main(options.prompts, options.tokens, options.rounds))
    except LenspoolError as error:
        raise SystemExit(f"lenspool: {error}") from None
