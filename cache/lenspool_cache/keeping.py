"""What a writing store does in the background: flush rows to the disk, and close packs that nobody fills any more."""

from __future__ import annotations

import logging
import os
import time
from threading import Condition, RLock, Thread

from lenspool_cache.writing import Writers

log = logging.getLogger(__name__)

# A power cut can lose what was put since the last flush, and nothing else. One begins after so many puts, bytes or
# seconds; when more than `_WAIT_BYTES` came meanwhile, a put waits for it.
SYNC_PUTS, SYNC_BYTES, SYNC_S = 64, 256 << 20, 5.0
_WAIT_BYTES = 4 * SYNC_BYTES
IDLE_S = 60.0  # a pack that nothing was put into for so long is closed: only then can it be evicted and uploaded


class Keeper:
    """One thread, that lives while its store has packs open for writing.

    Parameters
    ----------
    lock
        The store's lock around puts.
    """

    def __init__(self, writers: Writers, lock: RLock) -> None:
        self._writers = writers
        self._changed = Condition(lock)
        self._thread: Thread | None = None
        self._held: list[int] = []
        self._error: OSError | None = None
        self._puts = self._bytes = 0
        self._last = 0.0
        self._stopping = False

    def note(self, written: int) -> None:
        """Count a put; the caller holds the lock.

        Raises
        ------
        OSError
            An earlier flush failed: rows that were put before may not outlive a power cut.
        """
        self._puts += 1
        self._bytes += written
        self._last = time.monotonic()
        if self._thread is None:
            self._thread = Thread(target=self._run, name="lenspool-store", daemon=True)
            self._thread.start()
        elif self._due:
            self._changed.notify_all()
            while self._bytes > _WAIT_BYTES and self._error is None:
                self._changed.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def _due(self) -> bool:
        return self._puts >= SYNC_PUTS or self._bytes >= SYNC_BYTES

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._due or self._stopping):
                    self._changed.wait(SYNC_S)
                if self._stopping or not self._writers.open:
                    self._thread = None
                    self._changed.notify_all()
                    return
                idle = time.monotonic() - self._last >= IDLE_S
                puts, written = self._puts, self._bytes
                if puts or idle:
                    self._held = self._writers.duplicates()
                if idle:
                    self._writers.close()
            if self._held:
                self._flush(puts, written)

    def _flush(self, puts: int, written: int) -> None:
        error = None
        for fd in self._held:
            try:
                os.fdatasync(fd)
            except OSError as failed:
                log.warning("rows could not be flushed to the disk: %s", failed)
                error = failed
        with self._changed:
            self.release()
            self._puts -= puts
            self._bytes -= written
            self._error = error or self._error
            self._changed.notify_all()

    def release(self) -> None:
        """Close what is being flushed; in a forked child, too, where it belongs to the parent."""
        for fd in self._held:
            os.close(fd)
        self._held = []

    def stop(self) -> None:
        """End the thread, and wait for it; the caller does not hold the lock."""
        with self._changed:
            thread, self._stopping = self._thread, True
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        self._stopping = False
