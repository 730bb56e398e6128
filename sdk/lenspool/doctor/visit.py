"""All checks, in the order in which one would look."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lenspool.client import Client
from lenspool.config import Settings, settings
from lenspool.doctor.broker import check_broker
from lenspool.doctor.finding import Finding
from lenspool.doctor.gpu import check_gpu
from lenspool.doctor.machine import check_model_folder, check_settings, check_versions
from lenspool.doctor.pool import check_store, check_workers
from lenspool.errors import InvalidJob, LenspoolError


async def examine(
    redis: str | None = None, model: str | None = None, store: str | None = None, folder: Path | None = None
) -> list[Finding]:
    """Look at everything that a client or a worker on this machine needs.

    Parameters
    ----------
    redis, model, store
        As of `Client`.
    folder
        A model's folder to be looked at, too.
    """
    found = check_versions()
    try:
        outside = settings()
    except InvalidJob as error:
        found.append(Finding("settings", "error", str(error), "correct the file; see lenspool.config"))
        outside = Settings({}, {})
    else:
        found += check_settings(outside)
    found += await asyncio.to_thread(check_gpu)
    if folder is not None:
        found += await asyncio.to_thread(check_model_folder, folder)
    try:
        client = Client(redis, model=model, patience=5.0)
    except (LenspoolError, ValueError):  # a wrong file, which is said above; or no URL of Redis
        return found + await check_broker(redis or str(outside.values.get("redis", "")))
    broker = await check_broker(client.url)
    found += broker
    cards = []
    if not any(finding.state == "error" for finding in broker):
        try:
            async with client:
                cards = await client.models()
            found += check_workers(cards, client.model)
        except LenspoolError as error:
            found.append(Finding("workers", "error", str(error), "see the server's log"))
    found += await asyncio.to_thread(check_store, store or outside.values.get("store"), cards)
    return found
