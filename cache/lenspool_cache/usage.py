"""When entries were last used: noted in memory on a hit, and written to the index now and then, many at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from threading import Lock

from lenspool_cache.errors import CacheError
from lenspool_cache.index import Index

log = logging.getLogger(__name__)

FLUSH_S = 60.0
_FLUSH_KEYS = 10_000


class Usage:
    """Times of last use. They are hints: a lost one makes an entry look as old as its rows are."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lock = Lock()
        self._times: dict[bytes, int] = {}
        self._due = time.monotonic() + FLUSH_S

    def note(self, keys: Iterable[bytes]) -> bool:
        """Note that entries are used now; whether it is time for `flush`."""
        now = time.time_ns()
        with self._lock:
            self._times.update(dict.fromkeys(keys, now))
            return len(self._times) >= _FLUSH_KEYS or time.monotonic() >= self._due

    def flush(self) -> None:
        """Write what was noted to the index."""
        with self._lock:
            times, self._times = self._times, {}
            self._due = time.monotonic() + FLUSH_S
        if times and not self._index.read_only:
            try:
                self._index.touch(times)
            except CacheError as error:
                log.warning("times of last use are lost: %s", error)

    def all(self) -> dict[bytes, int]:
        """Entry key to nanoseconds since the epoch, of those that were used after they were written."""
        self.flush()
        return self._index.used()

    def after_fork(self) -> None:
        """Make the lock usable in a forked child."""
        self._lock = Lock()
