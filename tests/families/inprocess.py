"""vLLM's engine inside this process, with the few methods of `AsyncLLM` that lenspool uses.

A boot takes a few seconds instead of half a minute, most of which three processes spend on imports; model, worker,
runner and taps are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest import mock


class InProcessLLM:
    """`AsyncLLM` over `LLMEngine`: each waiting request steps the engine in turn."""

    errored = False
    output_handler = None

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._finished: dict[str, Any] = {}
        self.vllm_config = engine.vllm_config
        self.output_processor = engine.output_processor

    @classmethod
    def from_engine_args(cls, arguments: Any) -> InProcessLLM:
        from vllm.v1.engine.llm_engine import LLMEngine

        return cls(LLMEngine.from_engine_args(arguments))

    async def generate(self, prompt: Any, sampling: Any, request_id: str) -> AsyncIterator[Any]:
        async with self._lock:
            self._engine.add_request(request_id, prompt, sampling)
        while request_id not in self._finished:
            async with self._lock:
                if self._engine.has_unfinished_requests():
                    for output in await asyncio.to_thread(self._engine.step):
                        if output.finished:
                            self._finished[output.request_id] = output
        yield self._finished.pop(request_id)

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> Any:
        return await asyncio.to_thread(self._engine.collective_rpc, method, timeout, args)

    def shutdown(self, _timeout: float) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        del self._engine
        cleanup_dist_env_and_memory()


@contextlib.contextmanager
def in_process() -> Iterator[None]:
    """Have `lenspool_worker.engine.Engine` boot here; its end is not that of the process.

    Two things that vLLM does at each boot take longer than all else here, and do not change the model: it collects
    garbage half a dozen times (here once, afterwards), and it has a new process import an architecture's class to ask
    it what it can do (here this process does).
    """
    from lenspool_worker.sink import Sink

    def sink(path: str, instrument: Any, store: Any, _parent_gone: Any, rank: int) -> Sink:
        return Sink(path, instrument, store, lambda: None, rank)

    with (
        mock.patch.dict(os.environ, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
        mock.patch("vllm.v1.engine.async_llm.AsyncLLM", InProcessLLM),
        mock.patch("lenspool_worker.vllm_worker.Sink", sink),
        mock.patch("gc.collect", lambda *_: 0),
        mock.patch("vllm.model_executor.models.registry._run_in_subprocess", lambda ask: ask()),
    ):
        yield
    gc.collect()
