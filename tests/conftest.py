"""The real model that the tests run, prepared once; and which tests share a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.pools import client, store  # noqa: F401 - session fixtures

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHARED = ("client", "engine")
"""Session fixtures that take long to start: all tests that use one run in one process."""

LONGEST = ("client", "engine", "tests/families/test_parity.py")


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give processes of `-n` (pytest-xdist) whole modules, and those of one engine together; the longest first."""
    groups = {}
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        groups[item] = next((name for name in SHARED if name in fixtures), item.nodeid.partition("::")[0])
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    items.sort(key=lambda item: LONGEST.index(groups[item]) if groups[item] in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct (30 layers, d_model 576, 49,152 tokens)."""
    from lenspool_worker.demo_model import default_folder, prepare

    return prepare(default_folder())
