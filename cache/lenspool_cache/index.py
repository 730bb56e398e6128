"""The index: finds the records of an entry. It can be thrown away at any time and is rebuilt from the packs.

It says only "entry key -> pack and slot", and "hash of a block -> runs that may have rows of it". All else is read from
the record in the pack, which has a checksum, so a damaged index can make the store miss but not lie.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from lenspool_cache.database import Database, transaction
from lenspool_cache.ranges import Range

if TYPE_CHECKING:
    from lenspool_cache.follow import Follower

INDEX_VERSION = 3
_SCHEMA = (
    "CREATE TABLE pack (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    """CREATE TABLE entry (key BLOB NOT NULL, start INTEGER NOT NULL, rows INTEGER NOT NULL, pack INTEGER NOT NULL,
       slot INTEGER NOT NULL, PRIMARY KEY (key, start, rows)) WITHOUT ROWID""",
    "CREATE TABLE used (key BLOB PRIMARY KEY, time INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE lender (id INTEGER PRIMARY KEY, run BLOB NOT NULL, pack INTEGER NOT NULL, UNIQUE (run, pack))",
    "CREATE TABLE block (hash BLOB NOT NULL, lender INTEGER NOT NULL, PRIMARY KEY (hash, lender)) WITHOUT ROWID",
)
_DELETE = (
    "DELETE FROM entry WHERE key = ? AND start = ? AND rows = ? "
    "AND pack = (SELECT id FROM pack WHERE name = ?) AND slot = ?"
)
_VARIABLES = 500  # keys in one query
_ENDLESS = 2**63 - 1


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


class Index:
    """The index of one store.

    Parameters
    ----------
    folder
        Folder of the store.
    store_id
        Identity of the store; an index of another store is not believed.
    truth
        Gives all places that the packs hold, oldest first.
    blocks
        Gives the blocks of which there are rows at places.
    read_only
        Never create or change a file. Where SQLite cannot read the index that way, it is built in memory.
    follower
        The folder is shared by several machines: the index is this process's own, in memory, and reads on in what
        others write.
    """

    def __init__(
        self,
        folder: Path,
        store_id: str,
        truth: Callable[[], Iterable[Place]],
        blocks: Callable[[Iterable[Place]], Iterable[Block]],
        *,
        read_only: bool = False,
        follower: Follower | None = None,
    ) -> None:
        self.read_only = read_only
        self._truth = truth
        self._blocks = blocks
        self._follower = follower
        self._following = Lock()
        path = None if follower else folder / "index.sqlite"
        self._database = Database(path, INDEX_VERSION, store_id, self._fill, read_only=read_only)

    def find(self, keys: Sequence[bytes], within: Range | None = None) -> list[Place]:
        """Places of all segments of these entries; only of those that have rows `within` some positions."""
        first, stop = within or (0, _ENDLESS)
        self.follow()

        def work(db: sqlite3.Connection) -> list[Place]:
            out: list[Place] = []
            for i in range(0, len(keys), _VARIABLES):
                some = keys[i : i + _VARIABLES]
                marks = ",".join("?" * len(some))
                out += map(
                    Place._make,
                    db.execute(
                        "SELECT entry.key, start, rows, pack.name, slot FROM entry JOIN pack ON pack.id = entry.pack "
                        f"WHERE entry.key IN ({marks}) AND start < ? AND start + rows > ?",
                        [*some, stop, first],
                    ),
                )
            return out

        return self._database.run(work)

    def lenders(self, hashes: Sequence[bytes]) -> set[bytes]:
        """Keys of the runs that may have rows of any of these blocks."""

        def work(db: sqlite3.Connection) -> set[bytes]:
            found: set[bytes] = set()
            for i in range(0, len(hashes), _VARIABLES):
                some = hashes[i : i + _VARIABLES]
                rows = db.execute(
                    "SELECT DISTINCT run FROM block JOIN lender ON lender.id = block.lender "
                    f"WHERE hash IN ({','.join('?' * len(some))})",
                    some,
                )
                found.update(run for (run,) in rows)
            return found

        return self._database.run(work)

    def insert(self, places: Sequence[Place], blocks: Sequence[Block] | None = None) -> None:
        """Add places, all in one transaction. Where the same rows of an entry have a place already, that one stays.

        `blocks` are those of which there are rows; without them they are read from the packs.
        """
        self._transaction(lambda db: self._insert(db, places, blocks))

    def drop(self, places: Sequence[Place]) -> None:
        """Remove places, unless another record has taken over their rows meanwhile."""
        self._transaction(lambda db: db.executemany(_DELETE, places))

    def move(self, pairs: Sequence[tuple[Place, Place]]) -> None:
        """Replace places by others, in one transaction; one that was dropped meanwhile stays away."""

        def work(db: sqlite3.Connection) -> None:
            self._insert(db, [new for old, new in pairs if db.execute(_DELETE, old).rowcount])

        self._transaction(lambda db: work(db))

    def touch(self, times: Mapping[bytes, int]) -> None:
        """Set times of last use, in nanoseconds since the epoch."""
        rows = list(times.items())
        self._transaction(lambda db: db.executemany("REPLACE INTO used VALUES (?, ?)", rows))

    def used(self) -> dict[bytes, int]:
        """Times of last use by entry key."""
        return self._database.run(lambda db: dict(db.execute("SELECT key, time FROM used")))

    def forget_unused(self) -> None:
        """Delete the times of entries, and the names and blocks of packs, that are gone."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM used WHERE key NOT IN (SELECT key FROM entry)")
            db.execute("DELETE FROM pack WHERE id NOT IN (SELECT pack FROM entry)")
            db.execute("DELETE FROM lender WHERE pack NOT IN (SELECT id FROM pack)")
            db.execute("DELETE FROM block WHERE lender NOT IN (SELECT id FROM lender)")

        self._transaction(lambda db: work(db))

    def all(self) -> list[Place]:
        """Every place."""
        self.follow(now=True)
        query = "SELECT entry.key, start, rows, pack.name, slot FROM entry JOIN pack ON pack.id = entry.pack"
        return self._database.run(lambda db: [Place._make(row) for row in db.execute(query)])

    def follow(self, *, now: bool = False) -> None:
        """Add what other machines wrote, when it is time for a look, or now."""
        if self._follower is not None and (now or self._follower.due):
            with self._following:
                self.insert(list(self._follower.new()))

    def rebuild(self) -> None:
        """Throw the index away and read it anew from the packs."""
        self._database.rebuild()

    def close(self) -> None:
        """Close the connection; the next operation opens another."""
        self._database.close()

    def after_fork(self) -> None:
        """In a forked child: leave the parent's connection alone."""
        self._following = Lock()
        self._database.after_fork()

    def _transaction(self, work: Callable[[sqlite3.Connection], object]) -> None:
        self._database.run(lambda db: transaction(db, lambda: work(db)))

    def _fill(self, db: sqlite3.Connection) -> None:
        for statement in _SCHEMA:
            db.execute(statement)
        if self._follower is not None:
            self._follower.forget()
            self._insert(db, list(self._follower.new()))
            return
        # Scanned only now that writers find the new file: whoever committed to the old one before has its records in
        # the packs, and whoever commits later will notice the new file.
        self._insert(db, list(self._truth()))

    def _insert(self, db: sqlite3.Connection, places: Sequence[Place], blocks: Sequence[Block] | None = None) -> None:
        packs: dict[str, int] = {}

        def number(name: str) -> int:
            if name not in packs:
                db.execute("INSERT OR IGNORE INTO pack (name) VALUES (?)", (name,))
                packs[name] = db.execute("SELECT id FROM pack WHERE name = ?", (name,)).fetchone()[0]
            return packs[name]

        for key, start, rows, pack, slot in places:
            db.execute("INSERT OR IGNORE INTO entry VALUES (?, ?, ?, ?, ?)", (key, start, rows, number(pack), slot))
        known = self._blocks(places) if blocks is None else blocks
        for (run, pack), group in groupby(known, key=lambda block: (block.run, block.pack)):
            lender = run, number(pack)
            db.execute("INSERT OR IGNORE INTO lender (run, pack) VALUES (?, ?)", lender)
            found = db.execute("SELECT id FROM lender WHERE run = ? AND pack = ?", lender).fetchone()[0]
            db.executemany("INSERT OR IGNORE INTO block VALUES (?, ?)", [(block.hash, found) for block in group])
