"""One embedded pool for the whole session: real Valkey, real vLLM, real store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

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
