"""Real vLLM engines on SmolLM2, one shared by most tests, and the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from lenspool_cache import Store
from lenspool_worker.engine import Engine
from tests import tiny_llama as tiny_llama_model
from tests.engine.asking import Asker, Prompts
from tests.engine.oracle import Oracle


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(tmp_path_factory.mktemp("engine") / "store") as opened:
        yield opened


@pytest.fixture(scope="session")
def oracle(smollm2: Path) -> Oracle:
    return Oracle(smollm2)


@contextlib.asynccontextmanager
async def booted(folder: Path, store: Store, **options: Any) -> AsyncIterator[Asker]:
    """An engine for as long as it is needed."""
    engine = Engine(str(folder), store, options)
    await engine.start()
    try:
        yield Asker(engine, store)
    finally:
        await engine.stop()


@pytest_asyncio.fixture(scope="session")
async def engine(smollm2: Path, store: Store) -> AsyncIterator[Asker]:
    """SmolLM2, float32, eager."""
    async with booted(smollm2, store, max_model_len=1024) as asker:
        yield asker


@pytest.fixture(scope="session")
def prompts(smollm2: Path) -> Prompts:
    """Makes prompts of given lengths, as token ids: words in an order that is different in each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    words = ["apple", "river", "engine", "violin", "desert", "planet", "letter", "market", "winter", "mirror", "blue"]
    random = np.random.default_rng(0)

    def make(lengths: list[int]) -> list[list[int]]:
        made = []
        for length in lengths:
            ids = tokenizer("The " + " ".join(random.choice(words, length + 1)))["input_ids"]
            made.append([int(i) for i in ids[:length]])
            assert len(made[-1]) == length
        return made

    return make


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_model.save(tmp_path_factory.mktemp("models") / "tiny-llama")
