"""A SQLite file that many processes share and that can be thrown away at any time: it is filled anew where it is gone.

A missing, damaged or foreign file is replaced under a lock file; processes that still have the old one open notice that
it was replaced and do their last operation again on the new one (WAL mode; one machine, not a network file system).
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import RLock
from typing import TypeVar

from lenspool_cache.errors import CacheError, CacheFull
from lenspool_cache.locks import locked
from lenspool_cache.pack import is_full

log = logging.getLogger(__name__)

T = TypeVar("T")

_BUSY_S = 60.0
_MEMORY_S = 1.0  # how old an index in memory may grow, or this many times what it took to build
_MEMORY_BUILDS = 20
_CACHE_KB, _LOG_PAGES = 64 << 10, 8000
_ATTEMPTS = 4
_PAUSE_S = 0.01
_VANISHING_S = 30.0  # a file that others keep deleting is opened anew for so long

_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
# What using a file gives that another process deletes at that moment: of its three files the log may go first.
_VANISHED = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
_SHORT_READ = sqlite3.SQLITE_IOERR_SHORT_READ

# Connections that a fork carried into a child. SQLite forbids even closing them there.
_abandoned: list[sqlite3.Connection] = []


class Database:
    """One such file, or where it cannot be had, the same in memory.

    Parameters
    ----------
    path
        The file; None for a database of this process alone, in memory, which stays.
    version, owner
        A file of another version or owner is not believed.
    fill
        Makes the tables and their rows, in a transaction.
    read_only
        Never create or change a file. Where SQLite cannot read it that way, it is built in memory.
    """

    def __init__(
        self,
        path: Path | None,
        version: int,
        owner: str,
        fill: Callable[[sqlite3.Connection], None],
        *,
        read_only: bool = False,
    ) -> None:
        self._private = path is None
        self.path = path or Path("memory")
        self.read_only = read_only
        self._version = version
        self._owner = owner
        self._fill_tables = fill
        self._lock = RLock()
        self._connection: sqlite3.Connection | None = None
        self._signature: object = None
        self._memory_until: float | None = None
        self._immutable = False

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do some work with a connection; again from the start when the file was replaced meanwhile.

        Raises
        ------
        CacheFull, CacheError
            The disk is full; the file cannot be used.
        """
        try:
            return self._attempt(work)
        except OSError as error:
            if is_full(error):
                raise CacheFull(str(self.path.parent), 0) from error
            raise CacheError(f"the index {self.path} cannot be used: {error}") from error

    def rebuild(self) -> None:
        """Throw the file away and fill it anew."""
        with self._lock:
            self._forget()
            if not (self.read_only or self._private):
                with locked(self.path.with_name("index.lock")):
                    self._remove()
                    self._build()

    def close(self) -> None:
        """Close the connection; the next operation opens another."""
        with self._lock:
            self._forget()

    def after_fork(self) -> None:
        """In a forked child: leave the parent's connection alone and take a fresh lock."""
        self._lock = RLock()
        if self._connection is not None:
            _abandoned.append(self._connection)
            self._connection = None

    def _attempt(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            deadline = time.monotonic() + _VANISHING_S
            for attempt in count(1):
                try:
                    db = self._connected()
                    # Should the file be replaced from here on: whoever does it reads the packs later than that, and
                    # what we insert stands in them already.
                    return work(db)
                except sqlite3.Error as error:
                    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
                    if code & 0xFF == sqlite3.SQLITE_FULL:
                        raise CacheFull(str(self.path.parent), 0) from error
                    damaged = code & 0xFF in _DAMAGED or code == _SHORT_READ
                    vanished = self._moved() or code & 0xFF in _VANISHED
                    spent = attempt >= _ATTEMPTS and not (vanished and time.monotonic() < deadline)
                    if spent or not (damaged or vanished):
                        raise CacheError(f"the index {self.path} cannot be used: {error}") from error
                    log.warning("index %s: %s; it is opened anew", self.path, error)
                    self._discard(damaged)
                    time.sleep(_PAUSE_S)
        raise AssertionError("unreachable")

    def _discard(self, damaged: bool) -> None:
        bad = self._signature
        self._forget()
        if not damaged:
            return
        if self._private:
            return
        if self.read_only:
            self._open_in_memory()
            return
        with locked(self.path.with_name("index.lock")):
            if bad == self._stat():
                self._remove()

    def _connected(self) -> sqlite3.Connection:
        if self._connection is not None and self._moved():
            self._forget()
        if self._connection is None:
            if self._private:
                self._open_in_memory()
                self._memory_until = None
            elif self.read_only:
                self._open_read_only()
            else:
                self._open_shared()
        assert self._connection is not None
        return self._connection

    def _open_shared(self) -> None:
        with locked(self.path.with_name("index.lock")):
            if not self._usable():
                self._remove()
                self._build()
            self._signature = self._stat()
            self._connection = self._open(self.path.as_uri() + "?mode=rw")

    def _open_read_only(self) -> None:
        # A file without a log beside it has no writer and is complete: reading it as immutable creates no files. With
        # a log, SQLite needs its shared memory; where it cannot have that, what the log holds would be lost.
        self._immutable = not self._log().exists()
        self._signature = self._stat()
        if self._signature is not None:
            try:
                db = self._open(f"{self.path.as_uri()}?mode=ro" + ("&immutable=1" if self._immutable else ""))
                if self._is_ours(db):
                    self._connection = db
                    return
                db.close()
            except sqlite3.Error as error:
                log.info("index %s cannot be read: %s", self.path, error)
        self._open_in_memory()

    def _open_in_memory(self) -> None:
        begin = time.monotonic()
        db = self._open("file::memory:")
        self._fill(db)
        self._connection = db
        end = time.monotonic()
        self._memory_until = end + max(_MEMORY_S, _MEMORY_BUILDS * (end - begin))

    def _open(self, uri: str) -> sqlite3.Connection:
        db = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA synchronous = NORMAL")
        # Keys are hashes: each put touches pages all over the file, so more of them are kept, and written back later.
        db.execute(f"PRAGMA cache_size = -{_CACHE_KB}")
        db.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        return db

    def _forget(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
        self._connection = None
        self._memory_until = None

    def _log(self) -> Path:
        return self.path.with_name(self.path.name + "-wal")

    def _stat(self) -> tuple[int, ...] | None:
        """What tells that the file is still the one that was opened. While it is open its inode cannot be reused."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return None
        if self._immutable:
            return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size, self._log().exists()
        return stat.st_dev, stat.st_ino

    def _moved(self) -> bool:
        if self._private:
            return False
        if self._memory_until is not None:
            return time.monotonic() > self._memory_until
        now = self._stat()
        return now is None or now != self._signature

    # -- building

    def _usable(self) -> bool:
        if not self.path.exists():
            return False
        db = None
        try:
            db = self._open(self.path.as_uri() + "?mode=rw")
            return self._is_ours(db)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN):
                raise
            log.warning("index %s is damaged: %s", self.path, error)
            return False
        except sqlite3.DatabaseError as error:
            log.warning("index %s is damaged: %s", self.path, error)
            return False
        finally:
            if db is not None:
                db.close()

    def _is_ours(self, db: sqlite3.Connection) -> bool:
        if db.execute("PRAGMA user_version").fetchone()[0] != self._version:
            return False
        row = db.execute("SELECT value FROM meta WHERE name = 'store'").fetchone()
        return row is not None and row[0] == self._owner

    def _remove(self) -> None:
        # The log first: a log that stands beside a newer file would be played into it.
        for suffix in ("-wal", "-shm", "-journal", ""):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def _build(self) -> None:
        # SQLite makes files with 0644; the user's umask decides here.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        db = self._open(self.path.as_uri() + "?mode=rw")
        try:
            db.execute("PRAGMA journal_mode = WAL")
            self._fill(db)
        finally:
            db.close()

    def _fill(self, db: sqlite3.Connection) -> None:
        def work() -> None:
            db.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")
            db.execute("INSERT INTO meta VALUES ('store', ?)", (self._owner,))
            self._fill_tables(db)
            db.execute(f"PRAGMA user_version = {self._version}")

        transaction(db, work)


def transaction(db: sqlite3.Connection, work: Callable[[], object]) -> None:
    """Do some work in one transaction."""
    db.execute("BEGIN IMMEDIATE")
    try:
        work()
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
        raise
