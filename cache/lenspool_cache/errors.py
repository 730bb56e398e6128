"""The root of lenspool's error tree, and the errors of the store.

The whole tree is drawn in `lenspool.errors`. The root stands here because the store is the lowest layer.
"""

from __future__ import annotations


class LenspoolError(Exception):
    """Base of every error that lenspool raises on purpose.

    Attributes
    ----------
    job_id
        Id of the job that failed, or None when no job was queued.
    retryable
        True when sending the same request again can succeed without a change to it.
    """

    retryable: bool = False

    def __init__(self, message: str = "", *, job_id: str | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class CacheError(LenspoolError):
    """The store could not do what it was asked."""


class CacheCorrupt(CacheError):
    """A stored entry does not match its checksum or its key document. It is a miss, and can be computed again."""

    retryable = True

    def __init__(self, key: str, detail: str = "", *, job_id: str | None = None) -> None:
        super().__init__(f"store entry {key} is corrupt" + (f": {detail}" if detail else ""), job_id=job_id)
        self.key = key


class CacheMiss(CacheError, KeyError):
    """What was asked for is not stored, or not any more: it was evicted. It can be computed again."""

    retryable = True

    def __init__(self, name: str, detail: str, *, job_id: str | None = None) -> None:
        super().__init__(f"{name}: {detail}", job_id=job_id)
        self.name = name
        self.detail = detail

    __str__ = CacheError.__str__  # KeyError's would quote it


class CacheFull(CacheError):
    """The disk under the store has no room for an entry.

    Attributes
    ----------
    path
        Folder of the store.
    needed
        Bytes that were to be written.
    """

    retryable = True

    def __init__(self, path: str, needed: int, *, job_id: str | None = None) -> None:
        super().__init__(f"no room for {needed} bytes in the store at {path}", job_id=job_id)
        self.path = path
        self.needed = needed
