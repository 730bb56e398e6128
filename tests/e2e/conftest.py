"""What the tests of a whole pool share; the pool itself is the fixture `client` of `tests.pools`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from lenspool import Client


async def counters(client: Client) -> dict[str, Any]:
    """The engine's counters, read after this call began."""
    began = time.time()
    while True:
        (row,) = await client.status()
        (worker,) = row["workers"]
        if worker.get("time", 0) > began:
            return worker
        await asyncio.sleep(0.1)


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 distance; refuses what is not finite."""
    assert got.shape == expected.shape
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
