"""A pytest plugin: a real pool on this machine, once for the session.

In `conftest.py`: `pytest_plugins = ["lenspool.testing.plugin"]`; the model in pytest's settings as `lenspool_model`, or
in `LENSPOOL_TEST_MODEL`: a folder, or a name on the Hugging Face hub. It needs what a worker needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lenspool import sync


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the settings."""
    parser.addini("lenspool_model", "model of the pool that lenspool_pool starts", default="")


@pytest.fixture(scope="session")
def lenspool_pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[sync.Client]:
    """A client of a pool of the session's own, with an empty store, in float32.

    An asynchronous test connects a client of its own: `lenspool.Client(lenspool_pool.url)`.
    """
    model = request.config.getini("lenspool_model") or os.environ.get("LENSPOOL_TEST_MODEL")
    if not model:
        pytest.fail("no model for the pool: set lenspool_model in pytest's settings, or LENSPOOL_TEST_MODEL")
    store = tmp_path_factory.mktemp("lenspool") / "store"
    with sync.connect_local(model, store=store, engine={"dtype": "float32"}) as client:
        yield client
