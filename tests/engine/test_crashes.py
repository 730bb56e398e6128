"""Processes that die, and disks that are full: jobs fail typed and soon, and nothing stays behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lenspool.errors import CacheFull, EngineFailed
from lenspool_cache import Store
from tests.engine.asking import Asker
from tests.engine.conftest import booted

HOOK = "blocks.2.hook_resid_post"


def command(process: psutil.Process) -> str:
    """Its command line; empty when it has ended, reaped or not."""
    try:
        return " ".join(process.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return ""


def processes(parent: psutil.Process) -> list[psutil.Process]:
    """vLLM's processes below a process."""
    return [p for p in parent.children(recursive=True) if "VLLM" in command(p)]


def new_processes(before: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes(psutil.Process()) if p not in before]


async def gone(watched: list[psutil.Process], seconds: float) -> None:
    """Wait until all have ended."""
    _, left = await asyncio.to_thread(psutil.wait_procs, watched, timeout=seconds)
    left = [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
    assert not left, left


async def test_a_killed_worker_process(tiny_llama: Path, tmp_path: Path) -> None:
    """What was running may run elsewhere; the engine says that it is dead, and stops cleanly."""
    before = processes(psutil.Process())
    with Store(tmp_path / "store") as store:
        async with booted(tiny_llama, store) as asker:
            mine = new_processes(before)
            assert len(mine) == 2
            requests = [asker.request([1 + i, 2, 3], [HOOK], generate=480) for i in range(20)]
            running = [asyncio.create_task(asker.engine.run(request)) for request in requests]
            while (await asker.engine.stats())["max_batch"] < 10:
                await asyncio.sleep(0.05)
            (worker,) = [p for p in mine if "VLLM::Worker" in command(p)]
            worker.kill()
            began = time.monotonic()
            outcomes = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 30)
            assert time.monotonic() - began < 10
            for outcome in outcomes:
                assert isinstance(outcome, EngineFailed), outcome
                assert outcome.requeue and outcome.retryable  # type: ignore[attr-defined]
            assert not asker.engine.alive
            with pytest.raises(EngineFailed):
                await asker.engine.run(requests[0])
            with pytest.raises(EngineFailed):
                await asker.engine.stats()
            assert not any(store.covered(request.run, [HOOK]) for request in requests)
    assert not asker.engine.alive
    await gone(mine, 10)


async def test_a_stop_in_the_middle(tiny_llama: Path, tmp_path: Path) -> None:
    """What is running fails at once and may run elsewhere; no process stays."""
    before = processes(psutil.Process())
    with Store(tmp_path / "store") as store:
        async with booted(tiny_llama, store) as asker:
            mine = new_processes(before)
            requests = [asker.request([1 + i, 2, 3], [HOOK], generate=480) for i in range(8)]
            running = [asyncio.create_task(asker.engine.run(request)) for request in requests]
            while (await asker.engine.stats())["max_batch"] < 4:
                await asyncio.sleep(0.02)
        outcomes = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 2)
        assert all(isinstance(o, EngineFailed) and o.requeue for o in outcomes), outcomes  # type: ignore[attr-defined]
        await asker.engine.stop()  # a second one does nothing
    await gone(mine, 10)


SCRIPT = """
    import asyncio, sys
    from pathlib import Path
    from lenspool_cache import Run, Store
    from lenspool_worker.engine import Engine
    from lenspool_worker.requests import EngineRequest

    async def main():
        engine = Engine(sys.argv[1], Store(sys.argv[2]))
        await engine.start()
        Path(sys.argv[3]).touch()
        sampling = {"max_tokens": 500, "temperature": 0.0, "ignore_eos": True}
        while True:
            requests = [EngineRequest(f"{i}", [1, 2], (), [], sampling, Run({"i": i})) for i in range(8)]
            await asyncio.gather(*map(engine.run, requests))

    if __name__ == "__main__":
        asyncio.run(main())
"""


async def test_a_killed_parent(tiny_llama: Path, tmp_path: Path) -> None:
    """Its children do not outlive it by much, though they are busy."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ready = tmp_path / "ready"
    command = [sys.executable, str(script), str(tiny_llama), str(tmp_path / "store"), str(ready)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as parent:
        while not ready.exists():
            assert parent.poll() is None
            await asyncio.sleep(0.2)
        children = processes(psutil.Process(parent.pid))
        assert len(children) == 2
        await asyncio.sleep(1)
        parent.kill()
    await gone(children, 15)


async def test_a_start_that_fails(tiny_llama: Path, tmp_path: Path) -> None:
    """The reason is told, and no process is left."""
    before = processes(psutil.Process())
    folder = tmp_path / "no-weights"
    folder.mkdir()
    (folder / "config.json").write_text((tiny_llama / "config.json").read_text())
    with Store(tmp_path / "store") as store, pytest.raises(EngineFailed, match="did not start: "):
        async with booted(folder, store):
            raise AssertionError("there are no weights")
    await gone(new_processes(before), 10)


async def test_a_full_disk(engine: Asker, prompts: Callable[[list[int]], list[list[int]]]) -> None:
    """The job fails with it, and its rows are let go; when there is room the next one works."""
    (worker,) = [p for p in engine_processes(engine) if "VLLM::Worker" in command(p)]
    unlimited = worker.rlimit(psutil.RLIMIT_FSIZE)
    prompt = prompts([100])[0]
    request = engine.request(prompt, engine.hooks)
    worker.rlimit(psutil.RLIMIT_FSIZE, (2**20, unlimited[1]))  # no file of it can grow beyond 1 MB
    try:
        with pytest.raises(CacheFull):
            await engine.engine.run(request)
        assert engine.store.covered(request.run, engine.hooks) == {}
        await engine.settled()
    finally:
        worker.rlimit(psutil.RLIMIT_FSIZE, unlimited)
    assert engine.engine.alive
    assert len((await engine.capture(prompt, [HOOK]))[HOOK]) == 100


def engine_processes(engine: Asker) -> list[psutil.Process]:
    """The processes of one engine among several."""
    cores = [p.pid for p in engine.engine._llm.engine_core.resources.engine_manager.processes]
    return [child for pid in cores for child in psutil.Process(pid).children(recursive=True)]
