"""Booting vLLM takes a minute: done in a thread, so that the worker's heartbeats go on."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

_LOOK_S = 0.2


async def booted(boot: Callable[[], Any], *, again: bool) -> Any:
    """The `AsyncLLM` that `boot` makes. A boot that is cancelled leaves no process.

    Parameters
    ----------
    again
        The process has been serving, and has threads: its children are spawned, as a fork could inherit a held lock.
    """
    if again:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    before = multiprocessing.active_children()
    booting = asyncio.ensure_future(asyncio.to_thread(boot))
    try:
        return await asyncio.shield(booting)
    except asyncio.CancelledError:
        while not booting.done():
            for child in multiprocessing.active_children():
                if child not in before:
                    child.kill()
            await asyncio.wait([booting], timeout=_LOOK_S)
        if booting.exception() is None:
            await asyncio.to_thread(booting.result().shutdown)
        raise
