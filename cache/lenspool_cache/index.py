"""The SQLite index: finds the records of an entry. It can be thrown away at any time and is rebuilt from the packs.

It says only "entry key -> pack and slot", and "hash of a block -> runs that may have rows of it". All else is read from
the record in the pack, which has a checksum, so a damaged index can make the store miss but not lie.

Many processes share the file (WAL mode). A missing, damaged or foreign file is replaced under a lock file; processes
that still have the old one open notice that it was replaced and do their last operation again on the new one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count, groupby
from pathlib import Path
from threading import RLock
from typing import NamedTuple, TypeVar

from lenspool_cache.errors import CacheError, CacheFull
from lenspool_cache.segment import is_full

log = logging.getLogger(__name__)

T = TypeVar("T")

INDEX_VERSION = 3
_SCHEMA = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE pack (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    """CREATE TABLE entry (key BLOB NOT NULL, start INTEGER NOT NULL, rows INTEGER NOT NULL, pack INTEGER NOT NULL,
       slot INTEGER NOT NULL, PRIMARY KEY (key, start, rows)) WITHOUT ROWID""",
    "CREATE TABLE used (key BLOB PRIMARY KEY, time INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE lender (id INTEGER PRIMARY KEY, run BLOB NOT NULL, pack INTEGER NOT NULL, UNIQUE (run, pack))",
    """CREATE TABLE block (hash BLOB NOT NULL, lender INTEGER NOT NULL, PRIMARY KEY (hash, lender)) WITHOUT ROWID""",
)
_DELETE = (
    "DELETE FROM entry WHERE key = ? AND start = ? AND rows = ? "
    "AND pack = (SELECT id FROM pack WHERE name = ?) AND slot = ?"
)
_BUSY_S = 60.0
_VARIABLES = 500  # keys in one query
_MEMORY_S = 1.0  # how old an index in memory may grow, or this many times what it took to build
_MEMORY_BUILDS = 20
_ATTEMPTS = 4
_VANISHING_S = 5.0  # a file that others keep deleting is opened anew for so long

_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
# What opening a file gives that another process deletes at that moment.
_VANISHED = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
_SHORT_READ = sqlite3.SQLITE_IOERR_SHORT_READ

# Connections that a fork carried into a child. SQLite forbids even closing them there.
_abandoned: list[sqlite3.Connection] = []


class Place(NamedTuple):
    """Where the record of one segment stands."""

    key: bytes
    start: int
    rows: int
    pack: str
    slot: int


class Block(NamedTuple):
    """A pack has rows that a run has computed for positions of a block (`Run.blocks`)."""

    hash: bytes
    run: bytes
    pack: str


Truth = Callable[[], tuple[Iterable[Place], Iterable[Block]]]


class Index:
    """The index of one store.

    Parameters
    ----------
    folder
        Folder of the store.
    store_id
        Identity of the store; an index of another store is not believed.
    truth
        Gives all places and blocks that the packs hold, oldest first.
    read_only
        Never create or change a file. Where SQLite cannot read the index that way, it is built in memory.
    """

    def __init__(self, folder: Path, store_id: str, truth: Truth, *, read_only: bool = False) -> None:
        self.path = folder / "index.sqlite"
        self.store_id = store_id
        self.read_only = read_only
        self._truth = truth
        self._lock = RLock()
        self._connection: sqlite3.Connection | None = None
        self._signature: object = None
        self._memory_until: float | None = None
        self._immutable = False

    # -- operations

    def find(self, keys: Sequence[bytes]) -> list[Place]:
        """Places of all segments of these entries."""

        def work(db: sqlite3.Connection) -> list[Place]:
            out: list[Place] = []
            for i in range(0, len(keys), _VARIABLES):
                some = keys[i : i + _VARIABLES]
                marks = ",".join("?" * len(some))
                out += map(
                    Place._make,
                    db.execute(
                        "SELECT entry.key, start, rows, pack.name, slot FROM entry JOIN pack ON pack.id = entry.pack "
                        f"WHERE entry.key IN ({marks})",
                        some,
                    ),
                )
            return out

        return self._run(work)

    def lenders(self, hashes: Sequence[bytes]) -> dict[bytes, bytes]:
        """Runs that may have rows of blocks: run key -> the last block of its that is among these, in chain order."""

        def work(db: sqlite3.Connection) -> dict[bytes, bytes]:
            found: dict[bytes, bytes] = {}
            order = {hash_: i for i, hash_ in enumerate(hashes)}
            for i in range(0, len(hashes), _VARIABLES):
                some = hashes[i : i + _VARIABLES]
                rows = db.execute(
                    "SELECT run, hash FROM block JOIN lender ON lender.id = block.lender "
                    f"WHERE hash IN ({','.join('?' * len(some))})",
                    some,
                )
                for run, hash_ in rows:
                    if run not in found or order[found[run]] < order[hash_]:
                        found[run] = hash_
            return found

        return self._run(work)

    def insert(self, places: Sequence[Place], blocks: Iterable[Block] = ()) -> None:
        """Add places, all in one transaction. Where the same rows of an entry have a place already, that one stays."""
        self._run(lambda db: self._transaction(db, lambda: _insert(db, places, blocks)))

    def drop(self, places: Sequence[Place]) -> None:
        """Remove places, unless another record has taken over their rows meanwhile."""
        self._run(lambda db: self._transaction(db, lambda: db.executemany(_DELETE, places)))

    def move(self, pairs: Sequence[tuple[Place, Place]], blocks: Iterable[Block] = ()) -> None:
        """Replace places by others, in one transaction; one that was dropped meanwhile stays away."""

        def work(db: sqlite3.Connection) -> None:
            _insert(db, [new for old, new in pairs if db.execute(_DELETE, old).rowcount], blocks)

        self._run(lambda db: self._transaction(db, lambda: work(db)))

    def touch(self, times: Mapping[bytes, int]) -> None:
        """Set times of last use, in nanoseconds since the epoch."""
        rows = list(times.items())
        self._run(lambda db: self._transaction(db, lambda: db.executemany("REPLACE INTO used VALUES (?, ?)", rows)))

    def used(self) -> dict[bytes, int]:
        """Times of last use by entry key."""
        return self._run(lambda db: dict(db.execute("SELECT key, time FROM used")))

    def forget_unused(self) -> None:
        """Delete the times of entries, and the names and blocks of packs, that are gone."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM used WHERE key NOT IN (SELECT key FROM entry)")
            db.execute("DELETE FROM pack WHERE id NOT IN (SELECT pack FROM entry)")
            db.execute("DELETE FROM lender WHERE pack NOT IN (SELECT id FROM pack)")
            db.execute("DELETE FROM block WHERE lender NOT IN (SELECT id FROM lender)")

        self._run(lambda db: self._transaction(db, lambda: work(db)))

    def all(self) -> list[Place]:
        """Every place."""
        query = "SELECT entry.key, start, rows, pack.name, slot FROM entry JOIN pack ON pack.id = entry.pack"
        return self._run(lambda db: [Place._make(row) for row in db.execute(query)])

    def rebuild(self) -> None:
        """Throw the index away and read it anew from the packs."""
        with self._lock:
            self._forget()
            if not self.read_only:
                with self._file_lock():
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

    # -- connection

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return self._attempt(work)
        except OSError as error:
            if is_full(error):
                raise CacheFull(str(self.path.parent), 0) from error
            raise CacheError(f"the index {self.path} cannot be used: {error}") from error

    def _attempt(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            deadline = time.monotonic() + _VANISHING_S
            for attempt in count(1):
                db: sqlite3.Connection | None = None
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
                    vanished = self._moved() or (db is None and code & 0xFF in _VANISHED)
                    spent = attempt >= _ATTEMPTS and not (vanished and time.monotonic() < deadline)
                    if spent or not (damaged or vanished):
                        raise CacheError(f"the index {self.path} cannot be used: {error}") from error
                    log.warning("index %s: %s; it is opened anew", self.path, error)
                    self._discard(damaged)
        raise AssertionError("unreachable")

    def _discard(self, damaged: bool) -> None:
        bad = self._signature
        self._forget()
        if not damaged:
            return
        if self.read_only:
            self._open_in_memory()
            return
        with self._file_lock():
            if bad == self._stat():
                self._remove()

    def _connected(self) -> sqlite3.Connection:
        if self._connection is not None and self._moved():
            self._forget()
        if self._connection is None:
            if self.read_only:
                self._open_read_only()
            else:
                self._open_shared()
        assert self._connection is not None
        return self._connection

    def _open_shared(self) -> None:
        with self._file_lock():
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
        if self._memory_until is not None:
            return time.monotonic() > self._memory_until
        now = self._stat()
        return now is None or now != self._signature

    # -- building

    @contextmanager
    def _file_lock(self) -> Iterator[None]:
        fd = os.open(self.path.with_name("index.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

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
        if db.execute("PRAGMA user_version").fetchone()[0] != INDEX_VERSION:
            return False
        row = db.execute("SELECT value FROM meta WHERE name = 'store'").fetchone()
        return row is not None and row[0] == self.store_id

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
            for statement in _SCHEMA:
                db.execute(statement)
            db.execute("INSERT INTO meta VALUES ('store', ?)", (self.store_id,))
            # Scanned only now that writers find the new file: whoever committed to the old one before has its
            # records in the packs, and whoever commits later will notice the new file.
            _insert(db, *self._truth())
            db.execute(f"PRAGMA user_version = {INDEX_VERSION}")

        self._transaction(db, work)

    def _transaction(self, db: sqlite3.Connection, work: Callable[[], object]) -> None:
        db.execute("BEGIN IMMEDIATE")
        try:
            work()
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
            raise


def _insert(db: sqlite3.Connection, places: Iterable[Place], blocks: Iterable[Block]) -> None:
    packs: dict[str, int] = {}

    def number(name: str) -> int:
        if name not in packs:
            db.execute("INSERT OR IGNORE INTO pack (name) VALUES (?)", (name,))
            packs[name] = db.execute("SELECT id FROM pack WHERE name = ?", (name,)).fetchone()[0]
        return packs[name]

    for key, start, rows, pack, slot in places:
        db.execute("INSERT OR IGNORE INTO entry VALUES (?, ?, ?, ?, ?)", (key, start, rows, number(pack), slot))
    for (run, pack), group in groupby(blocks, key=lambda block: (block.run, block.pack)):
        db.execute("INSERT OR IGNORE INTO lender (run, pack) VALUES (?, ?)", (run, number(pack)))
        found = db.execute("SELECT id FROM lender WHERE run = ? AND pack = ?", (run, number(pack)))
        lender = found.fetchone()[0]
        db.executemany("INSERT OR IGNORE INTO block VALUES (?, ?)", [(block.hash, lender) for block in group])
