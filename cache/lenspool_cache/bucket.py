"""An object store through fsspec: objects by name under one URL (`s3://bucket/path`, or another that fsspec knows)."""

from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from lenspool_cache.errors import CacheError

T = TypeVar("T")

# A bucket that does not answer must not hold a job up for minutes.
_S3: dict[str, Any] = {"config_kwargs": {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 3}}}
_FILE: dict[str, Any] = {"auto_mkdir": True}


class Object(NamedTuple):
    """Seconds since an object was made, and its bytes."""

    age_s: float
    nbytes: int


class Bucket:
    """Objects under a URL. It connects when it is first asked for one; any number of threads may use it.

    Raises
    ------
    FileNotFoundError
        There is no such object.
    CacheError
        The object store cannot be reached, or refuses; when it is made: what speaks to it is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._lock = Lock()
        self._open: tuple[Any, str] | None = None
        self._at("")

    def _at(self, name: str) -> tuple[Any, str]:
        with self._lock:
            if self._open is None:
                try:
                    import fsspec

                    options = {"s3": _S3, "file": _FILE}.get(self.url.partition("://")[0], {})
                    self._open = fsspec.core.url_to_fs(
                        self.url, use_listings_cache=False, skip_instance_cache=True, **options
                    )
                except (ImportError, ValueError) as error:
                    raise CacheError(f"{self.url} cannot be used: {error} (pip install 'lenspool[s3]')") from error
            system, root = self._open
        return system, f"{root}/{name}"

    def _call(self, name: str, work: Callable[[Any, str], T]) -> T:
        system, path = self._at(name)
        try:
            return work(system, path)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such object", f"{self.url}/{name}") from None
        except Exception as error:  # botocore, aiohttp and others have trees of their own
            raise CacheError(f"{self.url} cannot be used: {error}") from error

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Bytes of an object, or of a range; fewer where it ends before."""

        def work(system: Any, path: str) -> bytes:
            try:
                return bytes(system.cat_file(path, start=start, end=stop))
            except OSError as error:
                if error.errno == errno.EINVAL and start:  # S3's word for a range behind the end
                    return b""
                raise

        return self._call(name, work)

    def write(self, name: str, data: bytes) -> None:
        """Make an object of bytes; it appears whole or not at all."""
        self._make(name, lambda system, path: system.pipe_file(path, data))

    def upload(self, file: Path, name: str) -> None:
        """Make an object of a file; it appears whole or not at all."""
        self._make(name, lambda system, path: system.put_file(str(file), path))

    def _make(self, name: str, work: Callable[[Any, str], object]) -> None:
        try:
            self._call(name, work)
        except FileNotFoundError as error:
            raise CacheError(f"{self.url} cannot be written to: is there such a bucket?") from error

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._call(name, lambda system, path: system.rm_file(path))

    def objects(self, folder: str) -> dict[str, Object]:
        """The objects in a folder, by their names in it."""

        def work(system: Any, path: str) -> dict[str, Object]:
            found = [info for info in system.find(path, detail=True).values() if info["type"] == "file"]
            return {info["name"].rsplit("/", 1)[-1]: Object(_age(info), int(info["size"])) for info in found}

        try:
            return self._call(folder, work)
        except FileNotFoundError:
            return {}

    def after_fork(self) -> None:
        """In a forked child: connect anew."""
        self._lock = Lock()
        self._open = None


def _age(info: dict[str, Any]) -> float:
    made = info.get("LastModified") or info.get("created")
    if isinstance(made, datetime):
        return (datetime.now(made.tzinfo) - made).total_seconds()
    return (datetime.now().timestamp() - made) if isinstance(made, int | float) else 0.0
