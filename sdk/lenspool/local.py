"""An embedded pool: server, worker and store for one notebook or script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import IO, Any, Unpack

from lenspool.client import Client
from lenspool.errors import PoolUnavailable
from lenspool.progress import waiting
from lenspool.worker_options import WorkerOptions

_STOP_S = 60.0
"""Seconds that a pool may take to stop before it is killed."""


@contextlib.asynccontextmanager
async def connect_local(
    model: str | Path,
    *,
    store: str | Path | None = None,
    engine: Mapping[str, Any] | None = None,
    compiled: bool = False,
    boot_timeout: float = 600.0,
    progress: bool = True,
    **options: Unpack[WorkerOptions],
) -> AsyncIterator[Client]:
    """Start a pool on this machine for as long as the context lives, and connect to it.

    Parameters
    ----------
    model
        Model folder, or name on the Hugging Face hub.
    store
        Folder of the results; default `~/.cache/lenspool/store`. Kept: the next pool on it has all results.
    engine
        Arguments of vLLM's engine, e.g. `{"max_model_len": 4096}`.
    compiled
        Compile the model: slower to boot, faster to run.
    boot_timeout
        Seconds that the engine may take to start.
    progress
        Say meanwhile that it starts, in a terminal or notebook only.
    options
        `name`, `max_in_flight`, `per_client`, ...: those of `lenspool worker`, see `WorkerOptions`.

    Raises
    ------
    PoolUnavailable
        The pool did not start; quotes the end of its log.
    """
    arguments = ["--model", str(model), "--engine", json.dumps(dict(engine or {})), "--follow-parent"]
    arguments += ["--compiled" if compiled else "--no-compiled"]
    arguments += ["--store", str(store)] if store is not None else []
    for option, value in options.items():
        arguments += [f"--{option.replace('_', '-')}", str(value)]
    with tempfile.TemporaryFile("w+") as log:
        process = _start(arguments, log)
        serving = False
        try:
            with waiting(progress, f"starting a pool for {Path(model).name}"):
                where = await _ready(process, log, boot_timeout)
            serving = True
            async with Client(where["redis"], model=where["model"], store=where["store"]) as client:
                yield client
        finally:
            await asyncio.to_thread(_stop, process, serving)


def _start(arguments: list[str], log: IO[str]) -> subprocess.Popen[bytes]:
    """Start the pool's process; it writes one JSON line to its stdout when it serves."""
    return subprocess.Popen(
        [sys.executable, "-m", "lenspool_worker", "up", *arguments, "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,  # an interrupt at the terminal is the script's, which then stops the pool
    )


async def _ready(process: subprocess.Popen[bytes], log: IO[str], timeout: float) -> dict[str, str]:
    assert process.stdout is not None
    reading = asyncio.ensure_future(asyncio.to_thread(process.stdout.readline))
    done, _ = await asyncio.wait([reading], timeout=timeout)
    if not done:
        process.kill()  # ends the pipe, and with it the reading thread
    text = await reading
    if not text:
        log.seek(0)
        tail = "\n".join(log.read().strip().splitlines()[-15:])
        raise PoolUnavailable(f"the pool did not start:\n{tail}" if done else f"no pool after {timeout:g} s:\n{tail}")
    where: dict[str, str] = json.loads(text)
    return where


def _stop(process: subprocess.Popen[bytes], serving: bool) -> None:
    """End the pool: gracefully when it serves, at once when it still boots."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()  # which a serving pool takes as the wish to stop
    try:
        process.wait(_STOP_S if serving else 0)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process.stdout.close()
