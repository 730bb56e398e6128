"""What is promised of dataset jobs, shown at size: `make dataset-proof` and `make dataset-memory`.

`proof`: a job of 5,000 short prompts on SmolLM2 whose driver is killed (SIGKILL) at a quarter and at three quarters,
and whose worker at a half, has the manifest of one that nothing happened to.

`memory`: 100,000 rows through a pretended pool into a real store, and all of them read again, take no more memory than
5,000, but for a bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import lenspool.sync
from lenspool import Client, Dataset
from lenspool.broker import Broker
from lenspool.testing import FakePool

HOOK = "resid_post.15"
BOUND_MIB = 48.0
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas"]
THINGS = ["apples", "books", "coins", "letters", "stones", "tickets", "roses", "maps", "keys", "songs"]


def prompts(count: int) -> list[dict[str, Any]]:
    return [
        {"text": f"{NAMES[i % 10]} has {i // 100} {THINGS[i // 10 % 10]} and wants {i % 7} more", "number": i}
        for i in range(count)
    ]


# -- proof


@contextlib.contextmanager
def worker(url: str, store: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker of SmolLM2, once it serves."""
    from lenspool_worker.demo_model import default_folder, prepare

    command = [sys.executable, "-m", "lenspool_worker", "worker", "--model", str(prepare(default_folder()))]
    command += ["--redis", url, "--store", str(store), "--no-compiled", "--engine", '{"dtype": "float32"}']
    with log.open("ab") as stream, lenspool.sync.Client(url, store=False) as client:
        known = {card.worker for card in client.models()}
        process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
        try:
            while not {card.worker for card in client.models()} - known:
                if process.poll() is not None:
                    raise RuntimeError(f"the worker did not start: {log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def driver(url: str, store: Path, rows: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "drive", url, str(store), str(rows)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def drive(url: str, store: str, rows: int) -> str:
    async with Client(url, store=store) as client:
        return (await client.dataset("proof", prompts(rows), HOOK, chunk=50)).hash


def done(store: Path) -> int:
    return 50 * len(list((store / "datasets" / "proof" / "parts").glob("*.jsonl")))


def until(store: Path, rows: int, running: subprocess.Popen[str]) -> None:
    while done(store) < rows:
        if running.poll() is not None:
            raise RuntimeError(f"the driver ended at {done(store)} rows")
        time.sleep(0.02)


def killed(store: Path, process: subprocess.Popen[Any], what: str) -> None:
    os.killpg(process.pid, signal.SIGKILL) if what == "worker" else process.kill()
    process.wait()
    print(f"  killed the {what} at {done(store)} rows", flush=True)


def uninterrupted(folder: Path, rows: int) -> str:
    with Broker() as broker, worker(broker.url, folder / "whole", folder / "log"):
        began = time.monotonic()
        answer, _ = driver(broker.url, folder / "whole", rows).communicate()
        print(f"uninterrupted: {rows} rows in {time.monotonic() - began:.0f} s, {answer.strip()}", flush=True)
    return answer.strip()


def interrupted(folder: Path, rows: int) -> str:
    store = folder / "killed"
    with Broker() as broker:
        with worker(broker.url, store, folder / "log") as first:
            running = driver(broker.url, store, rows)
            until(store, rows // 4, running)
            killed(store, running, "driver")
            running = driver(broker.url, store, rows)
            until(store, rows // 2, running)
            killed(store, first, "worker")
        with worker(broker.url, store, folder / "log"):
            until(store, 3 * rows // 4, running)
            killed(store, running, "driver")
            answer, _ = driver(broker.url, store, rows).communicate()
    print(f"killed three times: {answer.strip()}", flush=True)
    return answer.strip()


def proof(folder: Path, rows: int) -> None:
    expected, got = uninterrupted(folder, rows), interrupted(folder, rows)
    dataset = Dataset(folder / "killed" / "datasets" / "proof")
    whole = Dataset(folder / "whole" / "datasets" / "proof")
    compared = range(0, len(dataset), 10)
    worst = max(relative(dataset.matrix(i, HOOK), whole.matrix(i, HOOK)) for i in compared)
    print(dataset, f"rows of {len(compared)} sequences differ by {worst:.2g} (relative L2) at most", sep="\n")
    if worst > 1e-5:
        raise SystemExit("the activations differ")
    if not expected or expected != got:
        raise SystemExit("the manifests differ")
    print("the manifests are equal")


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


# -- memory


def peak_mib() -> float:
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


async def memory_of(folder: str, rows: int) -> dict[str, float]:
    """Peak memory of this process after it has made and read a dataset."""
    pool = FakePool(store=folder)

    def texts() -> Iterator[str]:
        for i in range(rows):
            pool.requests.clear()  # which a pretended pool keeps for its tests
            yield f"row number {i} of many"

    began = time.monotonic()
    dataset = await pool.client().dataset("rows", texts(), "resid_post.0", positions="last")
    made, made_s = peak_mib(), time.monotonic() - began
    count = dataset.statistics("resid_post.0").count
    assert count == rows
    return {"rows": rows, "made_mib": made, "read_mib": peak_mib(), "rows_per_s": rows / made_s}


def memory(rows: int, few: int, bound: float) -> None:
    found = []
    for count in (few, rows):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "measure", folder, str(count)]
            found.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
            print(found[-1], flush=True)
    grown = found[1]["read_mib"] - found[0]["read_mib"]
    print(f"{rows} rows take {grown:.1f} MiB more than {few}; the bound is {bound:g} MiB")
    if grown > bound:
        raise SystemExit("more than the bound")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    proving = commands.add_parser("proof")
    proving.add_argument("--rows", type=int, default=5000)
    measuring = commands.add_parser("memory")
    measuring.add_argument("--rows", type=int, default=100_000)
    measuring.add_argument("--few", type=int, default=5000)
    measuring.add_argument("--bound", type=float, default=BOUND_MIB)
    for name, arguments in (("drive", ("url", "store", "rows")), ("measure", ("folder", "rows"))):
        inner = commands.add_parser(name)
        for argument in arguments:
            inner.add_argument(argument, type=int if argument == "rows" else str)
    given = vars(parser.parse_args())
    command = given.pop("command")
    if command == "proof":
        with tempfile.TemporaryDirectory() as folder:
            proof(Path(folder), **given)
    elif command == "memory":
        memory(**given)
    elif command == "drive":
        print(asyncio.run(drive(**given)))
    else:
        print(json.dumps(asyncio.run(memory_of(**given))))


if __name__ == "__main__":
    main()
