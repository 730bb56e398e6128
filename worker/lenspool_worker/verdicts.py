"""The parent's end of the socket over which jobs are committed or discarded (see `lenspool_worker.sink`)."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from lenspool.errors import EngineFailed, from_wire


class Verdicts:
    """Sends verdicts to the engine's worker process, and awaits its answers."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lenspool-")  # mode 0700
        self.path = str(Path(self._folder.name) / "sink.sock")
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.lost = False

    async def open(self) -> None:
        """Listen for the worker process."""
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=2**24)

    async def connected(self, timeout: float = 30.0) -> None:
        """Wait until the worker process is there."""
        await asyncio.wait_for(self._connected.wait(), timeout)

    async def close(self) -> None:
        """Close the socket; what still waits fails."""
        if self._writer is not None:
            self._writer.close()
        if self._server is not None:
            self._server.close()
        self._fail()
        self._folder.cleanup()

    def send(self, tag: str, verdict: dict[str, Any]) -> asyncio.Future[dict[str, Any]]:
        """Send a verdict; the future is the worker process's answer.

        Raises
        ------
        EngineFailed
            The worker process is gone.
        """
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self._writer is None or self.lost:
            future.set_exception(gone())
            return future
        self._waiting[tag] = future
        self._writer.write(json.dumps({"tag": tag, **verdict}).encode() + b"\n")
        return future

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._connected.set()
        try:
            async for line in reader:
                answer = json.loads(line)
                future = self._waiting.pop(answer["tag"], None)
                if future is None or future.done():
                    continue
                if "error" in answer:
                    future.set_exception(from_wire(answer["error"]))
                else:
                    future.set_result(answer)
        except (ConnectionError, ValueError):
            pass  # the same as an end: what waits is told below
        finally:
            self._fail()

    def _fail(self) -> None:
        self.lost = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(gone())
        self._waiting.clear()


def gone() -> EngineFailed:
    """The error of a job whose engine died under it: another worker may run it."""
    error = EngineFailed("the engine's worker process is gone")
    error.retryable = True
    error.requeue = True  # type: ignore[attr-defined]
    return error
