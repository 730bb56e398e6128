"""How large and how old a store may grow. It stands in the store itself, so that every process keeps to the same."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from lenspool_cache.errors import CacheError

_FILE = "policy.json"
_LEAST_PACK, _MOST_PACK = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits of a store; what is pinned is kept in any case.

    Attributes
    ----------
    max_bytes
        Bytes on the disk, or None for no limit. Packs that are being written are kept, so it can be exceeded by them.
    max_age_s
        Seconds after its last use at which an entry goes, or None for no limit.
    """

    max_bytes: int | None = None
    max_age_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_age_s"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
                raise ValueError(f"{name} must be a number >= 0 or None, not {value!r}")

    @property
    def pack_bytes(self) -> int:
        """Largest pack: one in fifty of the limit, so that what cannot be evicted yet stays small beside it."""
        if self.max_bytes is None:
            return _MOST_PACK
        return min(max(self.max_bytes // 50, _LEAST_PACK), _MOST_PACK)

    @classmethod
    def load(cls, folder: Path) -> Policy:
        """Policy of the store in a folder; no limits where none was set.

        Raises
        ------
        CacheError
            Its file cannot be understood.
        """
        try:
            return cls(**json.loads((folder / _FILE).read_text()))
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError) as error:
            raise CacheError(f"{folder / _FILE} is no policy: {error}") from error

    def save(self, folder: Path) -> None:
        """Set the policy of the store in a folder."""
        temporary = folder / f".policy.{uuid.uuid4().hex}.tmp"
        temporary.write_text(json.dumps(asdict(self)) + "\n")
        temporary.replace(folder / _FILE)
