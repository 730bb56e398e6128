"""Locks on whole files. They end with their process, however it ends. Some network file systems have none."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lenspool_cache.errors import CacheError

_NONE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def lock(fd: int, mode: int) -> bool:
    """`flock` an open file, which must be open for reading and writing (NFS asks for that).

    Returns
    -------
    bool
        False where the file system has no locks.

    Raises
    ------
    BlockingIOError
        Another holds it, and the mode has `LOCK_NB`.
    """
    try:
        fcntl.flock(fd, mode)
    except OSError as error:
        if error.errno in _NONE:
            return False
        raise
    return True


@contextmanager
def locked(path: Path, mode: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the lock of a lock file, which is made.

    Raises
    ------
    BlockingIOError
        As in `lock`.
    CacheError
        The file system has no locks, so this cannot be done safely there.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not lock(fd, mode):
            raise CacheError(f"the file system of {path.parent} has no locks: do this on the machine that serves it")
        yield
    finally:
        os.close(fd)
