"""`store.json`: says that a folder is a store, of which version, and which one."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from pathlib import Path

from lenspool_cache.errors import CacheError

STORE_VERSION = 1


def store_id(path: Path, *, create: bool) -> str:
    """Identity of the store in a folder.

    Parameters
    ----------
    create
        Make the folder and its `store.json` where there is none.

    Raises
    ------
    CacheError
        The folder is no store, or one of another version.
    OSError
        It cannot be made.
    """
    file = path / "store.json"
    if not file.exists():
        if not create:
            raise CacheError(f"{path} is not a store: there is no store.json in it")
        path.mkdir(parents=True, exist_ok=True)
        temporary = path / f".store.{uuid.uuid4().hex}.tmp"
        try:
            temporary.write_text(json.dumps({"version": STORE_VERSION, "id": uuid.uuid4().hex}) + "\n")
            # A link, not a rename: of several makers the first wins and the others read its identity.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    try:
        document = json.loads(file.read_text())
        version, identity = document["version"], str(document["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(f"{path} is not a store: its store.json cannot be read: {error}") from error
    if version != STORE_VERSION:
        raise CacheError(f"the store at {path} has version {version}; this lenspool reads version {STORE_VERSION}")
    return identity
