"""Jobs in flight: one task each, and group commits of what ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lenspool import spans
from lenspool.errors import DeadlineExceeded, EngineFailed, JobCancelled, LenspoolError, to_wire
from lenspool.rq_json import StrictJSON
from lenspool_worker.taken import End, Entry

log = logging.getLogger(__name__)

Handler = Callable[[dict[str, Any], str], Awaitable[dict[str, Any]]]
Commit = Callable[[Sequence[Entry]], Awaitable[None]]

MAX_RESULT_BYTES = 1_000_000
_MAX_ERROR = 10_000


class Runs:
    """The jobs that a worker has in its hands.

    Parameters
    ----------
    handler
        Runs a document.
    commit
        Writes ends of runs; waits while Redis is away.
    batch
        Most ends in one commit.
    pause
        Seconds without new jobs after one that failed for reasons that would fail the next, too.

    Attributes
    ----------
    changed
        Set when a job ended or was committed.
    running
        Jobs that hold a place in the engine.
    hold_until
        No new jobs before (monotonic seconds).
    """

    def __init__(self, handler: Handler, commit: Commit, *, batch: int, pause: float) -> None:
        self._handler = handler
        self._commit_ends = commit
        self._batch = batch
        self._pause = pause
        self._entries: dict[str, Entry] = {}  # by execution id: running, or ended and not yet committed
        self._of_job: dict[str, list[Entry]] = {}  # the same by job id
        self._ended: list[Entry] = []
        self._committer: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()
        self.running = 0
        self.hold_until = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """Jobs in flight, for any thread."""
        return list(self._entries.values())

    @property
    def suspects(self) -> int:
        """Jobs in flight that have lost a worker before."""
        return sum(entry.suspect for entry in self._entries.values())

    @property
    def uncommitted(self) -> int:
        """Jobs that ended and wait for Redis."""
        return len(self._ended)

    def stop(self, job_id: str, execution_id: str | None, reason: End) -> None:
        """Stop a job, or one execution of it."""
        for entry in self._of_job.get(job_id, ()):
            if execution_id in (None, entry.execution.id):
                entry.stop(reason)

    def stop_all(self, reason: End) -> None:
        """Stop every job."""
        for entry in self.entries():
            entry.stop(reason)

    async def drained(self, seconds: float) -> None:
        """Wait until nothing is in flight, for at most some seconds."""
        end = time.monotonic() + seconds
        while self._entries and time.monotonic() < end:
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(end - time.monotonic()):
                    await self.changed.wait()

    def launch(self, entry: Entry) -> None:
        """Run a job that was claimed and started."""
        same = self._of_job.setdefault(entry.id, [])
        earlier = [other.task for other in same if other.task is not None]
        for other in same:
            other.stop("lost")  # Redis lost the job, or a reaper took it, and it came back here
        same.append(entry)
        self._entries[entry.execution.id] = entry
        self.running += 1
        entry.task = asyncio.create_task(self._run(entry, earlier))

    async def _run(self, entry: Entry, earlier: Sequence[asyncio.Task[None]]) -> None:
        """Run one job to its end, whatever the handler does."""
        entry.begun = True
        try:
            if entry.reason:
                raise asyncio.CancelledError
            if earlier:
                await asyncio.wait(earlier)
            await self._handle(entry)
        except asyncio.CancelledError:
            # without a reason it was the handler's own: something under it was cancelled
            cause = JobCancelled("the job was stopped") if entry.reason else EngineFailed("the run was cancelled")
            entry.end, entry.error = entry.reason or "failed", to_wire(cause)
        except Exception as error:
            entry.end, entry.error = "failed", _wire(error)
            if not isinstance(error, LenspoolError):
                log.exception("job %s", entry.id)
            elif error.retryable and getattr(error, "requeue", False):
                entry.end = "retried"
                self.hold_until = time.monotonic() + self._pause  # what just failed would fail the next job, too
        entry.ended, entry.over = time.time(), True
        self.running -= 1
        self._ended.append(entry)
        if self._committer is None or self._committer.done():
            self._committer = asyncio.create_task(self._commit())  # before the next claim, which uses the same thread
        self.changed.set()

    async def _handle(self, entry: Entry) -> None:
        clock = asyncio.timeout(entry.timeout)
        try:
            async with clock:
                with spans.running(entry.id, entry.document, entry.lane, entry.trace) as span:
                    value = await self._handler(entry.document, entry.id)
                    spans.ran(span, value)
        except TimeoutError:
            if entry.timeout is None or not clock.expired():
                raise
            raise DeadlineExceeded("run", entry.timeout) from None
        data = StrictJSON.dumps(value)
        if not isinstance(value, dict) or len(data) > MAX_RESULT_BYTES:
            raise EngineFailed("the run's answer is not a small JSON object")
        entry.value, entry.end = data, "finished"

    async def _commit(self) -> None:
        """Commit what ended while the last transaction was under way."""
        while self._ended:
            batch, self._ended = self._ended[: self._batch], self._ended[self._batch :]
            try:
                await self._commit_ends(batch)
            except Exception:
                log.exception("a batch could not be committed: one by one")
                for entry in batch:
                    try:
                        await self._commit_ends([entry])
                    except Exception:
                        log.exception("job %s could not be committed; its lease will lapse", entry.id)
            for entry in batch:
                self._forget(entry)
                self.changed.set()

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.execution.id]
        same = self._of_job[entry.id]
        same.remove(entry)
        if not same:
            del self._of_job[entry.id]


def _wire(error: Exception) -> str:
    """An error in wire form, whatever a handler put into it."""
    try:
        wire = to_wire(error)
    except (TypeError, ValueError):
        wire = ""
    if 0 < len(wire) < _MAX_ERROR:
        return wire
    return to_wire(EngineFailed(f"{type(error).__name__}: {error}"[: _MAX_ERROR // 2]))
