"""The content-hash HDF5 store of lenspool. It knows arrays and keys, not jobs or models."""

from lenspool_cache.collect import Collected, collect
from lenspool_cache.errors import CacheCorrupt, CacheError, CacheFull, CacheMiss, LenspoolError
from lenspool_cache.eviction import evict
from lenspool_cache.keys import Run, array_digest, canonical_json
from lenspool_cache.layers import save_lower
from lenspool_cache.policy import Policy
from lenspool_cache.segment import Segment
from lenspool_cache.store import Store
from lenspool_cache.verify import Damage, Report, verify

__all__ = [
    "CacheCorrupt",
    "CacheError",
    "CacheFull",
    "CacheMiss",
    "Collected",
    "Damage",
    "LenspoolError",
    "Policy",
    "Report",
    "Run",
    "Segment",
    "Store",
    "array_digest",
    "canonical_json",
    "collect",
    "evict",
    "save_lower",
    "verify",
]
