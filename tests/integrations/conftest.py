"""A bridge to the session's pool, and TransformerLens's own bridge of the same model in float32: the oracle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lenspool import Client
from lenspool.integrations.transformer_lens import PoolBridge, boot_pool
from tests.integrations import golden
from tests.integrations.inspect_models import Reference

os.environ.setdefault("WANDB_MODE", "disabled")

TOKENS = torch.tensor([golden.TOKENS])


@pytest.fixture(scope="session")
def bridge(smollm2: Path, client: Client) -> Iterator[PoolBridge]:
    with boot_pool(str(smollm2), client) as booted:
        yield booted


@pytest.fixture(scope="session")
def oracle(smollm2: Path) -> Any:
    """TransformerLens's torch model; it knows of no pool."""
    from transformer_lens.model_bridge import TransformerBridge

    with torch.no_grad():
        return TransformerBridge.boot_transformers(str(smollm2), device="cpu", dtype=torch.float32)


@pytest.fixture(scope="session")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


@pytest.fixture(scope="session")
def vector() -> np.ndarray:
    return np.random.default_rng(3).normal(0, 4.0, 576).astype(np.float32)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def far(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 distance, of what is finite in both; of zeros the distance itself."""
    assert got.shape == expected.shape
    keep = expected > torch.finfo(torch.float32).min / 2  # masked attention scores
    assert torch.equal(keep, got > torch.finfo(torch.float32).min / 2)
    got, expected = got[keep].double(), expected[keep].double()
    assert torch.isfinite(got).all()
    return float((got - expected).norm() / (expected.norm() or 1.0))
