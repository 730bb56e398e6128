"""A pool that is pretended, with a real store."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytest_asyncio

from lenspool import Dataset
from lenspool.testing import FakePool

HOOKS = ["resid_post.0", "resid_post.1"]


def numbered(count: int) -> list[dict[str, object]]:
    return [{"text": f"row {i} " + "of it " * (i % 5), "label": i % 2} for i in range(count)]


@pytest.fixture
def pool(tmp_path: Path) -> FakePool:
    return FakePool(store=tmp_path / "store")


@pytest_asyncio.fixture(scope="session")
async def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """60 rows of different length, in bfloat16."""
    from lenspool.readouts import loss, reduce
    from lenspool.testing import fake_card

    pool = FakePool(fake_card(dtype="bfloat16"), store=tmp_path_factory.mktemp("dataset") / "store")
    hooks = [*HOOKS, "z.1", "pattern.0", loss(), reduce("resid_post.1", "mean")]
    return await pool.client().dataset("rows", numbered(60), hooks, chunk=16)


@pytest_asyncio.fixture(scope="session")
async def packed(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The same rows in contexts of 32 tokens, in float32."""
    pool = FakePool(store=tmp_path_factory.mktemp("packed") / "store")
    return await pool.client().dataset("packed", numbered(60), HOOKS, context=32, separator=0, chunk=60)
