"""Compares every hook of every family with transformers in float32, and writes what it finds.

A program of its own, because vLLM then runs in this process (`tests.families.inprocess`) and changes it for good::

    python -m tests.families.parity out.json [family ...]
    python -m tests.families.parity --report docs/parity.md
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lenspool.hooks import template
from lenspool.vocabulary import BY_NAME
from lenspool_cache import Run, Store
from tests.families.checkpoints import CONFIGS, UNKNOWN, VOCABULARY, make
from tests.families.inprocess import in_process
from tests.families.reference import Reference

LENGTHS = (21, 13, 6)
EDITED = (4, 9)
GENERATED = 5
_READ = ("blocks.1.hook_resid_post", "blocks.2.attn.hook_pattern", "unembed.hook_out")
_OPTIONS = {
    "max_model_len": 128,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_batched_tokens": 16,  # longer prompts run in chunks, beside those of other requests
    "max_num_seqs": 16,
    "distributed_executor_backend": "uni",
}


class Expected:
    """What transformers says of one family; computed before vLLM changes transformers' classes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self._reference = Reference(make(name, folder))
        random = np.random.default_rng(0)
        self.prompts = [[int(t) for t in random.integers(3, VOCABULARY, length)] for length in LENGTHS]
        self.plain = [self._reference.run(prompt) for prompt in self.prompts]
        self.vectors: dict[str, np.ndarray] = {}
        self.edited: dict[str, dict[str, np.ndarray]] = {}
        for hook in self.plain[0]:
            if not BY_NAME[template(hook)].editable:
                continue
            if hook.startswith("blocks.") and not hook.startswith("blocks.1."):
                continue
            rows = self.plain[0][hook]
            vector = (random.standard_normal(rows.shape[1]) * rows.std()).astype(np.float32)
            self.vectors[hook] = vector
            edit = (hook, lambda rows, v=vector: rows + 1.5 * torch.from_numpy(v), EDITED)
            self.edited[hook] = self._reference.run(self.prompts[0], [edit])
        tokens = list(self.prompts[2])
        for _ in range(GENERATED):
            tokens.append(int(self._reference.run(tokens)["unembed.hook_out"][-1].argmax()))
        self.generated = tokens[len(self.prompts[2]) :]
        self.continued = self._reference.run(tokens[:-1])


async def compare(expected: Expected) -> dict[str, Any]:
    """Boot vLLM on a family's checkpoint, ask for everything at once, and compare."""
    from lenspool_worker.engine import CaptureGroup, Engine, EngineRequest

    began = time.monotonic()
    store = Store(expected.folder.parent / "store")
    engine = Engine(str(expected.folder), store, _OPTIONS)
    await engine.start()
    booted = time.monotonic() - began
    served = [hook["name"] for hook in engine.hooks]

    def request(run: str, tokens: list[int], hooks: Iterable[str], **rest: Any) -> EngineRequest:
        stop = None if rest.get("sampling") else len(tokens)
        options = {"interventions": [], "sampling": None, **rest}
        return EngineRequest(run, tokens, (CaptureGroup(tuple(hooks), ((0, stop),)),), run=Run({"run": run}), **options)

    requests = [request(f"plain {i}", prompt, served) for i, prompt in enumerate(expected.prompts)]
    for hook in expected.edited:
        if hook in served:
            value = {"array": store.put_array(expected.vectors[hook])}
            edit = {"hook": hook, "op": "add", "value": value, "coefficient": 1.5, "ranges": [list(EDITED)]}
            requests.append(request(f"edit {hook}", expected.prompts[0], {*_READ, hook}, interventions=[edit]))
    sampling = {"max_tokens": GENERATED, "temperature": 0.0, "ignore_eos": True}
    requests.append(request("generation", expected.prompts[2], served, sampling=sampling))
    results = await asyncio.gather(*(engine.run(r) for r in requests))
    stats = await engine.stats()
    await engine.stop()

    def errors(run: str, want: dict[str, np.ndarray], hooks: Iterable[str]) -> dict[str, tuple[float, float]]:
        length = len(want["unembed.hook_out"])
        return {h: _error(store.rows(Run({"run": run}), h, [(0, length)]), want[h]) for h in hooks if h in want}

    plain = [errors(f"plain {i}", want, served) for i, want in enumerate(expected.plain)]
    edits = {
        hook: max(e for e, _ in errors(f"edit {hook}", want, {*_READ, hook} & set(served)).values())
        for hook, want in expected.edited.items()
        if hook in served
    }
    return {
        "served": served,
        "expected": list(expected.plain[0]),
        "refusals": engine.refusals,
        "errors": _worst(lambda i: i[0], plain),
        "ratios": _worst(lambda i: i[1], plain),
        "edits": edits,
        "generation": _worst(lambda i: i[0], [errors("generation", expected.continued, served)]),
        "tokens": [results[-1].token_ids, expected.generated],
        "stats": stats,
        "boot_s": round(booted, 1),
        "total_s": round(time.monotonic() - began, 1),
        "versions": engine.info["numerics"],
    }


def _error(got: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """Relative L2 error and distance of the norms' ratio from 1; infinite for what is not even comparable."""
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf"), float("inf")
    masked = want < -1e30
    if masked.any() and not (got[masked] == np.finfo(got.dtype).min).all():
        return float("inf"), float("inf")
    got, want = np.where(masked, 0, got.astype(np.float64)), np.where(masked, 0, want.astype(np.float64))
    norm = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / norm, abs(float(np.linalg.norm(got)) / norm - 1)


def _worst(
    part: Callable[[tuple[float, float]], float], runs: list[dict[str, tuple[float, float]]]
) -> dict[str, float]:
    """Per hook, `{layer}` in place of its layer: the largest over runs and layers. NaN counts as the largest."""
    out: dict[str, float] = {}
    for errors in runs:
        for hook, pair in errors.items():
            value = part(pair)
            old = out.get(template(hook), 0.0)
            out[template(hook)] = value if not value <= old else old
    return out


async def measure(names: Iterable[str]) -> dict[str, Any]:
    """What `compare` finds for each family; an `error` where it could not be run."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        expected = {name: Expected(name, Path(folder) / f"{i}" / "model") for i, name in enumerate(names)}
        for name, reference in expected.items():
            try:
                with in_process():
                    found[name] = await compare(reference)
            except Exception:
                found[name] = {"error": traceback.format_exc()}
            print(name, found[name].get("error", f"{found[name].get('total_s')} s"), file=sys.stderr, flush=True)
    return found


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    target = sys.argv[1]
    if target == "--report":
        from tests.families.report import report

        Path(sys.argv[2]).write_text(report(asyncio.run(measure(CONFIGS))))
        return
    names = sys.argv[2:] or [*CONFIGS, *UNKNOWN]
    Path(target).write_text(json.dumps(asyncio.run(measure(names))))


if __name__ == "__main__":
    main()
