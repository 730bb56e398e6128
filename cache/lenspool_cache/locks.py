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
def locked(path: Path, mode: int = fcntl.LOCK_EX, *, required: bool = True) -> Iterator[bool]:
    """Hold the lock of a lock file, which is made; gives whether it is held.

    Raises
    ------
    BlockingIOError
        As in `lock`.
    CacheError
        It is required and the file system has no locks, so this cannot be done safely there.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        held = lock(fd, mode)
        if required and not held:
            raise no_locks(path.parent)
        yield held
    finally:
        os.close(fd)


def no_locks(folder: Path) -> CacheError:
    """What is raised where locks are needed and the file system has none."""
    return CacheError(f"the file system of {folder} has no locks: do this on the machine that serves it")
