"""The real model that the tests run, prepared once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct (30 layers, d_model 576, 49,152 tokens)."""
    from lenspool_worker.demo_model import default_folder, prepare

    return prepare(default_folder())
