"""Four writers, eight readers and a collector on one store, killed at any time: `python tests/cache/stress.py --help`.

No reader may ever get wrong bytes or an error, and nothing that was committed may be lost: without limits everything
whose `put` had returned, under a limit everything that was found after its `pins.add` had returned. Fails otherwise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
from store_samples import a_run, rows_of, same_bits

from lenspool_cache import CacheMiss, Policy, Store, collect, verify

WRITERS, READERS, SPAN, RECENT = 4, 8, 10**9, 500
HOOKS = {"h": ("float32", 64), "g": ("bfloat16", 512)}
PIN_EVERY = 40
PROCESSES = multiprocessing.get_context("fork")
COUNTS = ("puts", "pinned", "reads", "misses", "collections", "evicted", "moved")
Counts = dict[str, "Synchronized[int]"]


def truth(number: int, name: str) -> np.ndarray:
    dtype, width = HOOKS[name]
    return rows_of(number, 8 + number % 120, width, dtype)


def write(folder: Path, network: bool, base: int, last: Any, counts: Counts) -> None:
    """Put one run after the other; what it says in its log is committed, or pinned and there."""
    os.nice(10)  # so that the collector has its turns
    store = Store(folder, network=network)
    log = os.open(folder / f"log.{base}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    number = last[base] + 1 + SPAN * base
    while True:
        store.put(a_run(number), {name: [(0, truth(number, name))] for name in HOOKS})
        last[base] = number - SPAN * base
        kept = False
        if number % PIN_EVERY == 0:
            store.pins.add(f"writer{base}.{number // 1000}", [a_run(number).key])
            kept = len(store.covered(a_run(number), HOOKS)) == len(HOOKS)
        os.write(log, f"{number} {'kept' if kept else 'put'}\n".encode())
        with counts["puts"], counts["pinned"]:
            counts["puts"].value += 1
            counts["pinned"].value += kept
        number += 1


def read(folder: Path, network: bool, limited: bool, last: Any, counts: Counts) -> None:
    """Read parts of what was written lately; ends only when something is wrong, or lost without a limit."""
    os.nice(10)
    store = Store(folder, read_only=random.random() < 0.5, network=network)
    while True:
        base = random.randrange(WRITERS)
        if last[base] < 0:
            continue
        number = SPAN * base + max(0, last[base] - random.randrange(RECENT))
        name = random.choice(list(HOOKS))
        right = truth(number, name)
        start = random.randrange(len(right))
        stop = random.randint(start + 1, len(right))
        found = 1
        try:
            assert same_bits(store.rows(a_run(number), name, [(start, stop)]), right[start:stop]), "wrong bytes"
        except CacheMiss:
            assert limited or network, "lost"
            found = 0
        assert store._own.corrupt == 0, "something is taken for damaged"
        with counts["reads"], counts["misses"]:
            counts["reads"].value += found
            counts["misses"].value += 1 - found


def keep(folder: Path, network: bool, max_bytes: int | None, counts: Counts) -> None:
    """Collect almost all the time."""
    store = Store(folder, network=network)
    while True:
        done = collect(store, Policy(max_bytes=max_bytes))
        for name, count in (("collections", 1), ("evicted", done.evicted_bytes), ("moved", done.moved_bytes)):
            with counts[name]:
                counts[name].value += count
        time.sleep(0.05)


def logged(folder: Path, *states: str) -> Iterator[int]:
    for path in folder.glob("log.*"):
        for line in path.read_text().splitlines():
            number, _, state = line.partition(" ")
            if state in states:
                yield int(number)


def check(folder: Path, network: bool, limited: bool) -> int:
    """All must be there that was promised, also when the index is lost; returns for how many runs it was."""
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    promised = list(logged(folder, "kept") if limited else logged(folder, "kept", "put"))
    with Store(folder, network=network) as store:
        assert verify(store).damaged == []
        if limited:
            collect(store, Policy(max_bytes=0))
        for number in promised:
            for name in HOOKS:
                right = truth(number, name)
                assert same_bits(store.rows(a_run(number), name, [(0, len(right))]), right), f"run {number} is wrong"
    return len(promised)


def part(folder: Path, seconds: float, network: bool, max_bytes: int | None, seed: int) -> dict[str, float]:
    """Some time of it; figures.

    Parameters
    ----------
    max_bytes
        Limit of the store, or None for compaction alone.
    """
    Store(folder).close()
    if max_bytes is not None:
        with Store(folder) as store:
            store.policy = Policy(max_bytes=max_bytes)
    last = PROCESSES.Array("q", [-1] * WRITERS)
    counts: Counts = {name: PROCESSES.Value("q") for name in COUNTS}  # type: ignore[misc]
    works = [
        *((write, (folder, network, base, last, counts)) for base in range(WRITERS)),
        *[(read, (folder, network, max_bytes is not None, last, counts))] * READERS,
        (keep, (folder, network, max_bytes, counts)),
    ]
    running = [start(*work) for work in works]
    rng, kills, end = random.Random(seed), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(rng.uniform(0.05, 0.3))
        victim = rng.randrange(len(works))
        for process in running:
            assert process.exitcode is None, "a process ended by itself: see above"
        for values in counts.values():
            values.get_lock().acquire()  # nobody dies while holding one of these
        with last.get_lock():
            running[victim].kill()
            running[victim].join()
        for values in counts.values():
            values.get_lock().release()
        running[victim] = start(*works[victim])
        kills += 1
    for process in running:
        assert process.exitcode is None, "a process ended by itself: see above"
        process.kill()
        process.join()
    return {
        **{name: value.value for name, value in counts.items()},
        "kills": kills,
        "promised": check(folder, network, max_bytes is not None),
    }


def start(work: Any, arguments: tuple[Any, ...]) -> Any:
    process = PROCESSES.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def main() -> None:
    """Run the parts, and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of three parts")
    parser.add_argument("--short", action="store_true", help="without the part of a network file system")
    options = parser.parse_args()
    parts = [("no limit", False, None), ("limit", False, 8 << 20), ("limit, network", True, 8 << 20)]
    for seed, (title, network, max_bytes) in enumerate(parts[:2] if options.short else parts):
        root = Path(tempfile.mkdtemp(prefix="lenspool-stress-"))
        try:
            found = part(root / "store", options.seconds, network, max_bytes, seed)
        finally:
            shutil.rmtree(root)
        print(title, *(f"{name}={value}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
