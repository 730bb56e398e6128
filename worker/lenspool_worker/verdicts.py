"""The parent's end of the sockets over which jobs are committed or discarded (see `lenspool_worker.sink`)."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lenspool.errors import EngineFailed, from_wire
from lenspool_cache import ranges as rg
from lenspool_cache.ranges import OpenRange, Range

_SUMS = ("held_bytes", "bytes_written")


@dataclass
class _Waiting:
    """A verdict that not all of its processes have answered yet."""

    future: asyncio.Future[dict[str, Any]]
    ranks: set[int]
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)


class Verdicts:
    """Sends verdicts to the engine's worker processes, and awaits their answers.

    Parameters
    ----------
    processes
        How many there will be.
    """

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes
        self._folder = tempfile.TemporaryDirectory(prefix="lenspool-")  # mode 0700
        self.path = str(Path(self._folder.name) / "sink.sock")
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}  # by rank
        self._serving: set[asyncio.Task[None]] = set()
        self._connected = asyncio.Event()
        self._waiting: dict[str, _Waiting] = {}
        self._numbers = itertools.count()
        self.lost = False

    async def open(self) -> None:
        """Listen for the worker processes."""
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=2**24)

    async def connected(self, timeout: float = 30.0) -> None:
        """Wait until all worker processes are there."""
        await asyncio.wait_for(self._connected.wait(), timeout)

    async def close(self) -> None:
        """Close the sockets; what still waits fails."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()
        self._fail()
        if self._serving:  # they see the end; cancelled by the end of the loop, asyncio would report them
            await asyncio.wait(self._serving, timeout=5)
        self._folder.cleanup()

    def send(self, tag: str, verdict: Mapping[str, Any], ranks: Iterable[int] | None = None) -> asyncio.Future[Any]:
        """Send a verdict to all processes, or to some; the future is their answers, as `merged` makes one of them.

        The first error is the answer of all.

        Raises
        ------
        EngineFailed
            A worker process is gone.
        """
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self.lost or not self._connected.is_set():
            future.set_exception(gone())
            return future
        to = set(self._writers if ranks is None else ranks)
        number = f"{tag}/{next(self._numbers)}"  # a job may have several verdicts
        self._waiting[number] = _Waiting(future, to)
        line = json.dumps({"number": number, "tag": tag, **verdict}).encode() + b"\n"
        for rank in to:
            self._writers[rank].write(line)
        return future

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            rank = int(json.loads(await reader.readline())["rank"])
            self._writers[rank] = writer
            if len(self._writers) == self.processes:
                self._connected.set()
            async for line in reader:
                self._answered(rank, json.loads(line))
        except (ConnectionError, ValueError):
            pass  # the same as an end: what waits is told below
        finally:
            self._fail()

    def _answered(self, rank: int, answer: dict[str, Any]) -> None:
        waiting = self._waiting.get(answer["number"])
        if waiting is None:
            return
        waiting.answers[rank] = answer
        failed = "error" in answer
        if failed or waiting.answers.keys() >= waiting.ranks:
            del self._waiting[answer["number"]]
            if waiting.future.done():
                return
            if failed:
                waiting.future.set_exception(from_wire(answer["error"]))
            else:
                waiting.future.set_result(merged([waiting.answers[r] for r in sorted(waiting.answers)]))

    def _fail(self) -> None:
        self.lost = True
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(gone())
        self._waiting.clear()


def merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One answer of those of all processes: rows and bytes are summed, other counters are those of the busiest."""
    out: dict[str, Any] = {"rows": sum(answer.get("rows", 0) for answer in answers)}
    out["problems"] = [problem for answer in answers for problem in answer.get("problems", ())]
    out["suspects"] = {name: text for answer in answers for name, text in answer.get("suspects", {}).items()}
    stats = [answer["stats"] for answer in answers if "stats" in answer]
    if stats:
        out["stats"] = {name: (sum if name in _SUMS else max)(s[name] for s in stats) for name in stats[0]}
    return out


def wanted(captures: Iterable[Any], length: int) -> dict[str, list[Range]]:
    """Positions of each hook and readout that a job of `length` positions asks for; one may stand in several groups."""
    ranges: dict[str, list[OpenRange]] = {}
    for names, asked in captures:
        for name in names:
            ranges.setdefault(name, []).extend((a, b) for a, b in asked)
    return {name: rg.close(asked, length) for name, asked in ranges.items()}


def gone() -> EngineFailed:
    """The error of a job whose engine died under it: another worker may run it."""
    error = EngineFailed("the engine's worker process is gone")
    error.retryable = True
    error.requeue = True  # type: ignore[attr-defined]
    return error
