"""The main job end to end on this machine: `make demo`.

Prepares SmolLM2-135M-Instruct, starts a pool (`lenspool up`), captures, repeats from the store, steers, lets ten
clients ask at once, and stops the pool.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from lenspool import Client, add
from lenspool_worker.demo_model import default_folder, prepare

FOLDER = Path(".demo")
PROMPT = "The Eiffel Tower is in the city of"
console = Console(width=110, highlight=False)


def heading(text: str) -> None:
    console.print(f"\n[bold cyan]{text}[/]")


def gone(group: int, seconds: float) -> bool:
    """Whether a process group has ended, waiting for it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@contextmanager
def pool(model: Path) -> Iterator[str]:
    """`lenspool up` as a process of its own, stopped at the end; yields the URL of its Redis."""
    log = (FOLDER / "pool.log").open("w")
    command = [sys.executable, "-m", "lenspool.cli", "up", "--model", str(model), "--store", str(FOLDER / "store")]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=log, start_new_session=True)
    assert process.stdout is not None
    try:
        answer = process.stdout.readline()
        if not answer:
            raise SystemExit(f"the pool did not start: see {log.name}")
        yield json.loads(answer)["redis"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        if not gone(process.pid, 10.0):
            raise SystemExit("the pool left processes behind")
        console.print(f"\npool stopped (exit status {process.returncode}), no process left behind")


class Lens:
    """Reads a residual stream as a token: final norm, then unembedding (nostalgebraist 2020, "logit lens")."""

    def __init__(self, model: Path) -> None:
        from safetensors.numpy import load_file

        weights = load_file(model / "model.safetensors")
        self.norm = weights["model.norm.weight"].astype(np.float32)
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        self.head = head.astype(np.float32)
        self.eps = json.loads((model / "config.json").read_text())["rms_norm_eps"]

    def top(self, stream: np.ndarray, count: int) -> list[int]:
        """The `count` most likely token ids."""
        normed = stream / np.sqrt(np.mean(stream**2) + self.eps) * self.norm
        return [int(t) for t in np.argsort(-(self.head @ normed))[:count]]


async def capture(client: Client, lens: Lens) -> None:
    heading(f"1. Every layer's residual stream of {PROMPT!r}")
    began = time.perf_counter()
    first = await client.capture(PROMPT, "blocks.*.hook_resid_post")
    computed_s = time.perf_counter() - began
    console.print(f"tokens: {first.tokens}")
    table = Table("hook", "shape", "norm at the last token", "next token there, by the logit lens")
    for layer in (0, 10, 20, 25, 26, 27, 28, 29):
        rows = first[f"resid_post.{layer}"]
        words = (await client.capture(lens.top(rows[-1], 3), "hook_embed")).tokens or []
        norm = f"{np.linalg.norm(rows[-1]):.1f}"
        table.add_row(f"blocks.{layer}.hook_resid_post", str(rows.shape), norm, "  ".join(map(repr, words)))
    console.print(table)

    heading("2. The same again")
    began = time.perf_counter()
    second = await client.capture(PROMPT, "blocks.*.hook_resid_post")
    cached_s = time.perf_counter() - began
    same = all(np.array_equal(first[name], second[name]) for name in first)
    console.print(
        f"computed: {computed_s * 1e3:8.1f} ms   (cached={first.cached})\n"
        f"stored:   {cached_s * 1e3:8.1f} ms   (cached={second.cached}, bytes equal: {same}, "
        f"{computed_s / cached_s:.0f} times quicker)"
    )


async def steer(client: Client) -> None:
    heading("3. An intervention: the same question, steered")
    hook = "blocks.16.hook_resid_post"
    pair = ("I love the ocean, the sea, the waves and the beach", "I love the office, the desk, the paper and the room")
    ocean, office = [(await client.capture(p, hook, positions=slice(1, None)))[hook].mean(axis=0) for p in pair]
    messages = [{"role": "user", "content": "Tell me about your favourite place."}]
    plain = await client.generate(messages, max_tokens=40)
    edit = add(hook, ocean - office, coefficient=1.5)
    steered = await client.generate(messages, max_tokens=40, interventions=edit)
    console.print(f"[bold]plain:[/]   {plain.text!r}\n[bold]steered:[/] {steered.text!r}")


async def counters(client: Client) -> dict[str, int]:
    """The engine's counters, read after now."""
    began = time.time()
    while True:
        (worker,) = (await client.status())[0]["workers"]
        if worker.get("time", 0) > began:
            return worker
        await asyncio.sleep(0.1)


async def crowd(first: Client) -> None:
    heading("4. Ten clients at once, 12 prompts each, half of them shared")
    shared = [f"The number {i} is followed by the number" for i in range(6)]
    before = await counters(first)

    async def one(k: int) -> list[tuple[int, ...]]:
        async with Client(first.url) as client:
            prompts = shared + [f"Client {k} asks about the year {1900 + 10 * i}" for i in range(6)]
            results = client.map(prompts, "blocks.*.hook_resid_post", positions="last")
            return [tuple(result.token_ids) async for result in results]

    began = time.perf_counter()
    asked = [tokens for answers in await asyncio.gather(*(one(k) for k in range(10))) for tokens in answers]
    seconds = time.perf_counter() - began
    after = await counters(first)
    console.print(
        f"{len(asked)} answers in {seconds:.1f} s ({len(asked) / seconds:.0f}/s)\n"
        f"{len(set(asked))} distinct prompts of {sum(map(len, set(asked)))} tokens; "
        f"the engine ran {after['tokens'] - before['tokens']} tokens in {after['steps'] - before['steps']} steps"
    )


async def main(url: str, model: Path) -> None:
    async with Client(url) as client:
        card = await client.card()
        console.print(
            f"connected to {card.id}: {card.n_layers} layers, d_model {card.d_model}, {len(card.hooks)} hooks"
        )
        await capture(client, Lens(model))
        await steer(client)
        await crowd(client)


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    model = prepare(default_folder())
    console.print(f"model: {model}\nstarting a pool (server, worker, store) ...")
    began = time.perf_counter()
    with pool(model) as url:
        console.print(f"up after {time.perf_counter() - began:.0f} s")
        asyncio.run(main(url, model))
