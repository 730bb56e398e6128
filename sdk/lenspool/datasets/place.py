"""Where a dataset is, which store it refers to, and what its pins there are called."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lenspool.errors import CacheError, InvalidJob
from lenspool_cache import Store, canonical_json

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def place_of(store: Store | None, name: str, folder: str | os.PathLike[str] | None) -> Path:
    """Folder of a dataset: the one that is given, or the store's own for the name.

    Raises
    ------
    InvalidJob
        The name cannot be that of a folder and of pins, or there is neither folder nor store.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidJob("name", f"got {name!r}", "letters, digits, '.', '_' and '-', at most 64 of them")
    if folder is not None:
        return Path(folder)
    if store is None:
        raise InvalidJob("folder", "this client does not reach the store", "the folder of the dataset")
    return store.path / "datasets" / name


def store_of(folder: Path, told: Mapping[str, str], given: str | os.PathLike[str] | None) -> Path:
    """The store that a dataset refers to.

    Raises
    ------
    CacheError
        It is not there.
    """
    candidates = [Path(given)] if given is not None else [Path(told["path"]), folder.parent.parent]
    for path in candidates:
        if (path / "store.json").is_file():
            with Store(path, read_only=True) as store:
                if store.id == told["id"]:
                    return path.absolute()
    raise CacheError(f"the store {told['id']} of the dataset in {folder} is not at {' or '.join(map(str, candidates))}")


def pin_name(name: str, spec: Mapping[str, Any]) -> str:
    """What the names of a dataset's pins begin with."""
    return f"dataset.{name}.{hashlib.sha256(canonical_json(spec)).hexdigest()[:12]}"
