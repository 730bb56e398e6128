"""Content keys: what makes two results the same result.

A *run* is one deterministic computation: a model context, token ids, interventions and sampling. Its key document is
plain JSON; the run key is the SHA-256 of the document's canonical bytes, and the entry key of one hook of that run is
the SHA-256 of the run key and the hook's name. All hashes have full width.

Runs whose prompts begin alike are found by the chained hashes of their blocks (`Run.blocks`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from lenspool_cache.prefix import BLOCK, edits_within, sequence


def canonical_json(document: Any) -> bytes:
    """Serialise so that equal documents give equal bytes: sorted keys, no spaces, ASCII, no NaN or Infinity.

    Raises
    ------
    ValueError
        A number is not finite.
    TypeError
        Something in it is not JSON.
    """
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def array_digest(array: np.ndarray) -> str:
    """SHA-256 (hex) of an array's dtype, shape and C-order bytes, each field length-prefixed."""
    array = np.ascontiguousarray(array)
    digest = hashlib.sha256()
    for field in (array.dtype.name.encode(), repr(tuple(map(int, array.shape))).encode()):
        digest.update(len(field).to_bytes(8, "little") + field)
    digest.update(array.nbytes.to_bytes(8, "little"))
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def entry_of(run_key: bytes, name: str) -> bytes:
    """32-byte key of a named entry of the run with that key."""
    encoded = name.encode()
    return hashlib.sha256(run_key + len(encoded).to_bytes(8, "little") + encoded).digest()


def run_key(data: bytes) -> bytes:
    """32-byte key of the run that a stored key document belongs to."""
    return hashlib.sha256(data).digest()


def entry_key(data: bytes, name: str) -> bytes:
    """32-byte key of the entry that a stored key document and name belong to."""
    return entry_of(run_key(data), name)


class Run:
    """The identity of one computation.

    Parameters
    ----------
    document
        JSON object with everything that can change an output bit.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = dict(document)

    @classmethod
    def stored(cls, data: bytes) -> Run:
        """The run that a stored key document is of; its key is that of these bytes."""
        run = cls(json.loads(data))
        run.__dict__["data"] = data
        return run

    @cached_property
    def data(self) -> bytes:
        """Canonical bytes of the document; stored beside the rows and compared on a hit."""
        return canonical_json(self.document)

    @cached_property
    def key(self) -> bytes:
        """32-byte run key."""
        return run_key(self.data)

    @cached_property
    def blocks(self) -> list[bytes]:
        """32-byte hashes of all that decides the rows of the first 16, 32, ... positions."""
        found = sequence(self.document)
        if found is None:
            return []
        base, tokens, edits = found
        if not all(type(token) is int for token in tokens):
            return []
        ids = np.asarray(tokens, np.int64)
        last, out = hashlib.sha256(canonical_json(base)).digest(), []
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            here = edits_within(edits, start, start + BLOCK)
            data = last + ids[start : start + BLOCK].tobytes() + (canonical_json(here) if here else b"")
            last = hashlib.sha256(data).digest()
            out.append(last)
        return out

    def entry(self, name: str) -> bytes:
        """32-byte key of one named entry (a hook, or `generation`) of this run."""
        return entry_of(self.key, name)

    def __repr__(self) -> str:
        return f"Run({self.key.hex()[:16]})"
