"""What lies under a store: other stores that are only read. What they have is not computed and not stored again."""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from lenspool_cache.errors import CacheCorrupt, CacheError
from lenspool_cache.keys import Run
from lenspool_cache.lending import Sources
from lenspool_cache.ranges import Range
from lenspool_cache.segment import Segment

if TYPE_CHECKING:
    from lenspool_cache.store import Store

log = logging.getLogger(__name__)

_FILE = "lower.json"


class Layer(Protocol):
    """One store under another.

    Attributes
    ----------
    place
        Its folder or URL.
    far
        Whether reading is slow, so that what was read is worth a copy in the store above.
    """

    place: str
    far: bool

    def find(self, sources: Sources, within: Range | None) -> list[Segment]:
        """As `Lookup.find`."""
        ...

    def lenders(self, blocks: Sequence[bytes]) -> set[bytes]:
        """As `Index.lenders`."""
        ...

    def read_into(self, segment: Segment, out: np.ndarray) -> None:
        """As `Lookup.read_into`."""
        ...

    def read(self, segments: Sequence[Segment]) -> list[np.ndarray]:
        """Rows of segments; of a far layer this is quicker than one by one."""
        ...

    def identity(self, segment: Segment) -> tuple[Run, str]:
        """The run and the name of the entry that a segment which was found belongs to."""
        ...

    def has_array(self, digest: str) -> bool:
        """Whether an array is there."""
        ...

    def get_array(self, digest: str) -> np.ndarray:
        """As `Store.get_array`."""
        ...

    def close(self) -> None:
        """Close all files."""
        ...

    def after_fork(self) -> None:
        """In a forked child: leave the parent's connections alone."""
        ...


def open_layers(folder: Path, lower: Sequence[str | os.PathLike[str]] | None) -> list[Layer]:
    """Layers of the store in a folder: those given, or with None those that it names itself.

    Raises
    ------
    CacheError
        One that was given cannot be opened.
    """
    out: list[Layer] = []
    for place in load_lower(folder) if lower is None else map(place_of, lower):
        try:
            out.append(_open(place))
        except CacheError as error:
            if lower is not None:
                raise
            log.warning("the store at %s goes without a lower layer: %s", folder, error)
    return out


def _open(place: str) -> Layer:
    if "://" in place:
        from lenspool_cache.remote import Remote

        return Remote(place)
    from lenspool_cache.store import Store

    return Folder(Store(place, read_only=True, lower=()))


def below(layer: Layer, sources: Sources, within: Range | None) -> list[Segment]:
    """What a layer has; nothing when it fails, since the store above works without it."""
    if not sources:
        return []
    try:
        return layer.find(sources, within)
    except CacheError as error:
        log.warning("the lower layer %s is left out: %s", layer.place, error)
        return []


def lenders_below(layer: Layer, blocks: Sequence[bytes]) -> set[bytes]:
    """Runs of a layer that may lend rows; none when it fails."""
    try:
        return layer.lenders(blocks)
    except CacheError as error:
        log.warning("the lower layer %s is left out: %s", layer.place, error)
        return set()


def from_below(layers: Sequence[Layer], digest: str) -> np.ndarray:
    """An array from the first layer that has it.

    Raises
    ------
    KeyError
        None has.
    """
    for layer in layers:
        try:
            return layer.get_array(digest)
        except (KeyError, CacheCorrupt):
            continue
        except CacheError as error:
            log.warning("the lower layer %s is left out: %s", layer.place, error)
    raise KeyError(digest)


class Folder:
    """A store in a folder, e.g. a lab's, mounted read-only."""

    far = False

    def __init__(self, store: Store) -> None:
        self.place = str(store.path)
        self._store = store
        self.find = store._own.find
        self.lenders = store._own.lenders
        self.read_into = store._own.read_into
        self.identity = store._own.identity
        self.has_array = store.has_array
        self.get_array = store.get_array
        self.close = store.close

    def read(self, segments: Sequence[Segment]) -> list[np.ndarray]:
        """Rows of segments."""
        return [self._store.read(segment) for segment in segments]

    def after_fork(self) -> None:
        """Nothing: every `Store` notices a fork by itself."""


def load_lower(folder: Path) -> list[str]:
    """Folders and URLs of the layers that a store itself names; they stand in it, so all its processes have the same.

    Raises
    ------
    CacheError
        Its file cannot be understood.
    """
    try:
        document = json.loads((folder / _FILE).read_text())
        return [str(place) for place in document["lower"]]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise CacheError(f"{folder / _FILE} names no lower layers: {error}") from error


def save_lower(folder: Path, lower: Iterable[str | os.PathLike[str]]) -> None:
    """Set the layers that a store names."""
    temporary = folder / f".lower.{uuid.uuid4().hex}.tmp"
    temporary.write_text(json.dumps({"lower": [place_of(place) for place in lower]}) + "\n")
    temporary.replace(folder / _FILE)


def place_of(place: str | os.PathLike[str]) -> str:
    """A URL as it is; a folder with its whole path."""
    text = os.fspath(place)
    return text if "://" in text else str(Path(text).expanduser().absolute())
