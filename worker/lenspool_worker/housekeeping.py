"""A worker keeps its store to its limits and uploads it, in the background; of several workers one at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path

from lenspool_cache import CacheError, Store, collect, save_lower
from lenspool_cache.remote import Remote
from lenspool_cache.upload import upload

log = logging.getLogger(__name__)

_EVERY_S = 60.0
_COPY_BYTES_PER_S = 200 << 20


def set_limits(store: Store, cache_bytes: int | None, cache_days: float | None) -> None:
    """Give a store new limits, 0 for none; what is None stays as it is."""
    policy = store.policy
    if cache_bytes is not None:
        policy = dataclasses.replace(policy, max_bytes=cache_bytes or None)
    if cache_days is not None:
        policy = dataclasses.replace(policy, max_age_s=cache_days * 86400 or None)
    if policy != store.policy:
        store.policy = policy


def set_lower(folder: Path, lower: str) -> None:
    """Give a store other lower layers: folders or URLs, separated by commas. Each must be there, or be reached later.

    Raises
    ------
    CacheError
        One cannot be opened.
    """
    places = [place.strip() for place in lower.split(",") if place.strip()]
    Store(folder, lower=places).close()
    save_lower(folder, places)


async def keep_uploaded(store: Store, url: str, every_s: float = _EVERY_S) -> None:
    """Upload what is new now and then, until cancelled. A bucket that does not answer stops nothing else."""
    remote, uploaded = Remote(url), set[str]()
    try:
        while True:
            try:
                done = await asyncio.to_thread(upload, store, remote, uploaded)
            except CacheError as error:
                log.warning("nothing is uploaded: %s", error)
            else:
                if done.segments:
                    log.info("%d segments uploaded, %d bytes", done.segments, done.nbytes)
            await asyncio.sleep(every_s)
    finally:
        remote.close()


async def keep_limits(store: Store, every_s: float = _EVERY_S) -> None:
    """Evict and compact now and then, until cancelled. That the store cannot be written to stops nothing else."""
    while True:
        await asyncio.sleep(every_s)
        try:
            done = await asyncio.to_thread(collect, store, bytes_per_s=_COPY_BYTES_PER_S)
        except CacheError as error:
            log.warning("the store was not cleaned: %s", error)
            continue
        if done.evicted:
            log.info("%d segments evicted, the store takes %d bytes", done.evicted, done.after_bytes)
