"""One embedded pool for the whole session: real Valkey, real vLLM, real store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import lenspool
from lenspool import Client

ENGINE = {"dtype": "float32", "max_model_len": 1024}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pool") / "store"


@pytest_asyncio.fixture(scope="session")
async def client(smollm2: Path, store: Path) -> AsyncIterator[Client]:
    async with lenspool.connect_local(smollm2, store=store, engine=ENGINE) as connected:
        yield connected


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
