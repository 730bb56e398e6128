"""Which driver works on which chunk: small files in the dataset's folder, for drivers of any hosts that share it.

claims/<chunk>   the driver that has the chunk; made so that only one of several can
claims/<driver>  a driver's pulse, written anew every few seconds; its host and process

No lock of the system is asked for, since network file systems may have none, or some that hold on one machine only, and
no clocks are compared: a driver is gone when its pulse stands still for `LEASE_S` by the clock of who looks, or at once
when it was a process of this host that runs no more. Claims save work and nothing hangs on them: of two drivers that do
the same chunk both leave the same file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import uuid
from pathlib import Path

BEAT_S, LEASE_S = 2.0, 20.0
_LOOK_S = 0.2


class Claims:
    """The claims of one driver, which lives from `open` to `close`.

    Attributes
    ----------
    driver
        Its name among all drivers.
    """

    def __init__(self, folder: Path) -> None:
        self.driver = f"driver-{uuid.uuid4().hex[:12]}"
        self._folder = folder
        self._about = f"{_host()} {os.getpid()} {_started(str(os.getpid()))}"
        self._mine: set[int] = set()
        self._seen: dict[str, tuple[str, float]] = {}  # pulses of others, and since when they are as they are
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="lenspool-dataset", daemon=True)

    def open(self) -> None:
        """Begin to live."""
        self._tell(0)
        self._beating.start()

    def close(self) -> None:
        """Give everything back."""
        for chunk in list(self._mine):
            self.release(chunk)
        self._over.set()
        self._beating.join()
        (self._folder / self.driver).unlink(missing_ok=True)

    def take(self, chunk: int) -> bool:
        """Take a chunk, unless another driver that lives has it."""
        path = self._path(chunk)
        for _ in range(2):
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                holder = _read(path)
                if holder is None:
                    continue
                if not self._gone(holder):
                    return False
                self._clear(path)
                continue
            with os.fdopen(fd, "w") as stream:
                stream.write(self.driver)
            self._mine.add(chunk)
            return True
        return False

    def free(self, chunk: int) -> bool:
        """Whether the chunk could be taken now."""
        holder = _read(self._path(chunk))
        return holder is None or self._gone(holder)

    def release(self, chunk: int) -> None:
        """Give a chunk back."""
        self._mine.discard(chunk)
        path = self._path(chunk)
        if _read(path) == self.driver:  # not that of who took this driver for dead
            path.unlink(missing_ok=True)

    async def settled(self) -> None:
        """Wait until of each driver that has a claim it is known whether it lives."""
        holders = {_read(path) for path in self._folder.glob("[0-9]*")} - {None, self.driver}
        pulses = {holder: self._pulse(holder) for holder in holders if holder is not None}
        while any(not self._gone(name) and self._pulse(name) == pulse for name, pulse in pulses.items()):
            await asyncio.sleep(_LOOK_S)

    # -- inside

    def _path(self, chunk: int) -> Path:
        return self._folder / f"{chunk:08d}"

    def _clear(self, path: Path) -> None:
        """Take a dead driver's claim away; of several that try one does."""
        aside = path.with_name(f".{uuid.uuid4().hex}")
        try:
            path.rename(aside)
        except FileNotFoundError:
            return
        aside.unlink()

    def _gone(self, driver: str) -> bool:
        pulse = self._pulse(driver)
        if pulse is None:  # it went, and left no pulse
            return True
        now = time.monotonic()
        before, since = self._seen.get(driver, (None, now))
        if pulse != before:
            self._seen[driver], since = (pulse, now), now
        about = pulse.split()[1:]
        ended = len(about) == 3 and about[0] == _host() and _started(about[1]) != about[2]
        if not ended and now - since <= LEASE_S:
            return False
        if driver:
            (self._folder / driver).unlink(missing_ok=True)
        return True

    def _pulse(self, driver: str) -> str | None:
        """None of a driver that has ended; of a claim whose name is not written yet, one that stands still."""
        return _read(self._folder / driver) if driver else ""

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(BEAT_S):
            count += 1
            with contextlib.suppress(OSError):  # a full disk, a server away: it may pass, or this driver counts as gone
                self._tell(count)

    def _tell(self, count: int) -> None:
        # in its place, not by a rename: who opens a file on NFS sees what was written to it, but may see an old name
        fd = os.open(self._folder / self.driver, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.write(fd, f"{count:012d} {self._about}\n".encode())
        finally:
            os.close(fd)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return None


def _host() -> str:
    """Name of the machine since it booted, for processes that see each other; another each time where none is told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return f"unknown-{uuid.uuid4().hex}"


def _started(pid: str) -> str:
    """When a process of this host was started; empty when there is none, or the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
