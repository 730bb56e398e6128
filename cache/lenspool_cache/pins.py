"""Pins: names under which runs and entries are kept, whatever the limits say. One small text file each."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lenspool_cache.locks import locked, no_locks

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Pins:
    """The pins of one store: name to a set of 32-byte keys, of runs (all their entries) or of single entries."""

    def __init__(self, store: Path) -> None:
        self.folder = store / "pins"

    def add(self, name: str, keys: Iterable[bytes]) -> None:
        """Pin keys under a name, beside those that it has. What is stored when this returns stays from now on.

        Without locks on the file system nobody collects, and new names are made all the same, where there are links.

        Raises
        ------
        CacheError
            The name is there, and the file system has no locks.
        ValueError
            The name is not a plain file name, or a key has not 32 bytes.
        """
        path, keys = self._path(name), set(keys)
        if any(len(key) != 32 for key in keys):
            raise ValueError("a pinned key has 32 bytes")
        self.folder.mkdir(exist_ok=True)
        draft = self._draft(name, keys)
        try:
            with locked(self.folder / ".lock", required=False) as alone:
                try:
                    os.link(draft, path)
                except OSError:  # it is there, or cannot be made so
                    if not alone:
                        raise no_locks(self.folder) from None
                    self._draft(name, keys | self._read(path)).replace(path)
        finally:
            draft.unlink()

    def remove(self, name: str) -> bool:
        """Give a name up; whether there was one."""
        path = self._path(name)
        if not path.exists():
            return False
        with locked(self.folder / ".lock"):
            path.unlink(missing_ok=True)
        return True

    def all(self) -> dict[str, set[bytes]]:
        """Every name with its keys."""
        if not self.folder.exists():
            return {}
        return {p.name: self._read(p) for p in sorted(self.folder.iterdir()) if _NAME.fullmatch(p.name)}

    def keys(self) -> set[bytes]:
        """Every pinned key."""
        return set().union(*self.all().values())

    @contextmanager
    def held(self) -> Iterator[set[bytes]]:
        """Every pinned key, and while it is held no other is pinned: what a collector deletes meanwhile has no pin."""
        self.folder.mkdir(exist_ok=True)
        with locked(self.folder / ".lock"):
            yield self.keys()

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"a pin's name is letters, digits, '.', '_' and '-', not {name!r}")
        return self.folder / name

    def _draft(self, name: str, keys: Iterable[bytes]) -> Path:
        path = self.folder / f".{name}.{uuid.uuid4().hex}.tmp"
        path.write_text("\n".join(sorted(key.hex() for key in keys)) + "\n")
        return path

    @staticmethod
    def _read(path: Path) -> set[bytes]:
        try:
            return {bytes.fromhex(line) for line in path.read_text().split()}
        except FileNotFoundError:
            return set()
