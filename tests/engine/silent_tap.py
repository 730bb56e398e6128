"""A process that boots an engine of whose taps one was never put in, and prints what the engine says to that.

`python -m tests.engine.silent_tap MODEL STORE`
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from unittest import mock

from lenspool.errors import EngineFailed
from lenspool_cache import Store
from lenspool_worker.engine import Engine
from tests.families.inprocess import in_process


async def main(model: str, store: str) -> None:
    """Leave the taps behind layers out."""
    options = {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 128, "distributed_executor_backend": "uni"}
    engine = Engine(model, Store(Path(store)), options)
    with in_process(), mock.patch("lenspool_worker.families.hooking.after_pair"):
        try:
            await engine.start()
        except EngineFailed as error:
            print("refused:", error)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
