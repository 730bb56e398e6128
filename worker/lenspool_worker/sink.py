"""The way of finished rows: from vLLM's worker processes straight into the store.

The parent decides over each job when its request has ended, by a line of JSON over a Unix socket: `commit`, `discard`,
`check` at boot, `store` for what is no hook's, or `stats` for its counters. No tensor crosses the socket. One thread
here does what it says and answers. Of a model on several processes each has such a thread, and stores the rows of its
own layers.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lenspool.errors import EngineFailed, to_wire
from lenspool_cache import Run, Store
from lenspool_cache import ranges as rg
from lenspool_worker.capture import JobRows
from lenspool_worker.instrument import Instrument
from lenspool_worker.selfcheck import examine
from lenspool_worker.verdicts import wanted

log = logging.getLogger(__name__)


class Sink:
    """Answers the parent's verdicts, in a thread of its own.

    Parameters
    ----------
    path
        Unix socket on which the parent listens.
    orphaned
        Called in the thread when the parent has closed it, or has died.
    rank
        Of this process among all of the model.
    """

    def __init__(
        self, path: str, instrument: Instrument, store: Store, orphaned: Callable[[], object], rank: int = 0
    ) -> None:
        self._orphaned = orphaned
        self._instrument = instrument
        self._store = store
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.sendall(json.dumps({"rank": rank}).encode() + b"\n")
        self.written = 0
        threading.Thread(target=self._serve, name="lenspool-sink", daemon=True).start()

    def _serve(self) -> None:
        try:
            self._answer()
        except OSError as error:
            log.warning("the engine's parent cannot be reached: %s", error)
        self._orphaned()

    def _answer(self) -> None:
        """Obey verdicts until the parent closes the socket."""
        with self._socket, self._socket.makefile("rwb") as stream:
            for line in stream:
                verdict = json.loads(line)
                try:
                    answer = self._obey(verdict)
                except Exception as error:
                    log.warning("job %s: %s", verdict["tag"], error)
                    answer = {"error": to_wire(error)}
                stream.write(json.dumps({"number": verdict["number"], **answer}).encode() + b"\n")
                stream.flush()

    def _obey(self, verdict: Mapping[str, Any]) -> dict[str, Any]:
        if verdict["op"] == "stats":
            return {"stats": {**self._instrument.stats(), "bytes_written": self.written}}
        if verdict["op"] == "store":
            self._put(verdict["run"], _documents(verdict["entries"]))
            return {"rows": 0}
        rows = self._instrument.take(verdict["tag"])
        if verdict["op"] == "discard":
            return {"rows": 0, "failed": rows is not None and rows.error is not None}
        if rows is None:
            raise EngineFailed("the engine's worker process never saw the job")
        if rows.error is not None:
            raise EngineFailed(rows.error)
        if not self._instrument.place.writes:
            return {"rows": 0}
        if verdict["op"] == "check":
            return {"rows": 0, **self._check(rows, verdict)}
        return {"rows": self._commit(rows, verdict)}

    def _check(self, rows: JobRows, verdict: Mapping[str, Any]) -> dict[str, Any]:
        derived, length = self._instrument.derived, verdict["length"]
        hooks = [name for name in verdict["hooks"] if self._instrument.serves(name)]
        computed = {}
        for name in hooks:
            if name in derived:
                computed[name] = derived.assemble(rows, name, [(0, length)], length)[0][1]
        found = examine(rows, hooks, length, verdict["tolerance"], computed)
        suspects: dict[str, str] = {}
        for problem in found:
            for name in problem.hooks:
                suspects.setdefault(name, problem.text)
        return {"problems": [problem.text for problem in found], "suspects": suspects}

    def _commit(self, rows: JobRows, verdict: Mapping[str, Any]) -> int:
        closed = {
            name: ranges
            for name, ranges in wanted(verdict["captures"], verdict["length"]).items()
            if self._instrument.serves(name)
        }
        try:
            entries = self._instrument.readouts.assemble(rows, closed, verdict["length"])
        except LookupError as error:
            raise EngineFailed(f"rows are missing: {error.args[0]}") from error
        self._put(verdict["run"], {**entries, **_documents(verdict["entries"])})
        return sum(map(rg.count, closed.values()))

    def _put(self, run: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
        self.written += self._store.put(Run(dict(run)), {name: rows for name, rows in entries.items() if rows})


def _documents(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries that are JSON, as rows of one byte each."""
    return {
        name: [(0, np.frombuffer(json.dumps(document).encode(), dtype=np.uint8)[:, None])]
        for name, document in entries.items()
    }
