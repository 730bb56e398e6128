"""Compares every hook of every family with transformers, in every mode, and writes what it finds.

A program of its own, because vLLM then runs in this process (`tests.families.inprocess`) and changes it for good::

    python -m tests.families.parity --out out.json chunked:Llama,Mixtral compiled:Llama
    python -m tests.families.parity --report docs/parity.md
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from torch._dynamo.utils import counters

from lenspool.hooks import template
from lenspool_cache import Store
from lenspool_cache.codec import BFLOAT16
from tests.engine.asking import Asker
from tests.families.checkpoints import CONFIGS
from tests.families.expected import HALF, Expected, Run
from tests.families.inprocess import in_process
from tests.families.modes import MODES, Answer, Mode

Errors = dict[str, tuple[float, float]]
"""Hook -> relative L2 error, and distance of the norms' ratio from 1."""
_ROUNDING = 2.0**-9
"""Relative error of a number that is rounded to bfloat16, at most."""
_MASKED = [float(ml_dtypes.finfo(dtype).min) for dtype in (np.float32, BFLOAT16)]


async def compare(expected: Expected, mode: Mode) -> dict[str, Any]:
    """Boot vLLM on a family's checkpoint, ask for everything, and compare."""
    from lenspool_worker.engine import Engine

    began = time.monotonic()
    graphs = _graphs()
    engine = Engine(str(expected.folder), Store(expected.folder.parent / "store"), mode.options_for(expected))
    await engine.start()
    asker = Asker(engine, engine._store)
    outcome = await mode.ask(asker, expected)
    await engine.stop()
    low = mode.options.get("dtype") == "bfloat16"
    errors = [_errors(answer.rows, answer.run, answer.start) for answer in outcome.answers]
    identities = [expected.weights.errors(answer.rows, whole=answer.start == 0) for answer in outcome.answers]
    return {
        "served": asker.hooks,
        "expected": list(expected.plain[0].rows),
        "refusals": engine.refusals,
        "errors": _worst(lambda pair: pair[0], errors),
        "ratios": _worst(lambda pair: pair[1], errors),
        "identities": {name: max(found.get(name, 0.0) for found in identities) for name in identities[0]},
        "edits": {hook: max(e for e, _ in _errors(a.rows, a.run).values()) for hook, a in outcome.edited.items()},
        "tokens": [[answer.generated, answer.run.generated] for answer in outcome.answers],
        "greedy": all(_greedy(answer) for answer in outcome.answers),
        "half": _half(expected, errors) if low else {},
        "met": {**outcome.met, "compiled_graphs": _graphs() - graphs},
        "seconds": round(time.monotonic() - began, 1),
        "versions": engine.info["numerics"],
    }


def _graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    return int(counters["stats"]["unique_graphs"])


def _errors(rows: Mapping[str, np.ndarray], run: Run, start: int = 0) -> Errors:
    return {hook: _error(got, run.rows[hook][start:]) for hook, got in rows.items() if hook in run.rows}


def _error(got: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """Infinite for what is not even comparable."""
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf"), float("inf")
    masked = want < -1e30
    if not np.isin(got[masked].astype(np.float64), _MASKED).all():
        return float("inf"), float("inf")
    got, want = np.where(masked, 0, got.astype(np.float64)), np.where(masked, 0, want.astype(np.float64))
    norm = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / norm, abs(float(np.linalg.norm(got)) / norm - 1)


def _worst(part: Callable[[tuple[float, float]], float], runs: Iterable[Errors]) -> dict[str, float]:
    """Per hook, `{layer}` in place of its layer: the largest over runs and layers. NaN counts as the largest."""
    out: dict[str, float] = {}
    for errors in runs:
        for hook, pair in errors.items():
            value = part(pair)
            old = out.get(template(hook), 0.0)
            out[template(hook)] = value if not value <= old else old
    return out


def _greedy(answer: Answer) -> bool:
    """Whether each generated token is the largest logit of the position before it."""
    if not answer.generated:
        return True
    rows = answer.rows["unembed.hook_out"][len(answer.run.prompt) - 1 - answer.start :]
    return rows.argmax(1).tolist() == answer.generated


def _half(expected: Expected, ours: Sequence[Errors]) -> dict[str, tuple[float, float]]:
    """Per hook: the largest error of transformers' own bfloat16, and how many times as large ours is at most, over
    prompts and layers. Where transformers has no error (a norm of embeddings, in float64 here), ours may have rounded.
    """
    theirs = [_errors(half.rows, plain) for half, plain in zip(expected.half, expected.plain, strict=True)]
    own = _worst(lambda pair: pair[0], theirs)
    factors = [
        {hook: (pair[0] / max(other[hook][0], _ROUNDING), 0.0) for hook, pair in mine.items()}
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return {hook: (own[hook], factor) for hook, factor in _worst(lambda pair: pair[0], factors).items()}


async def measure(wanted: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Mode -> family -> what `compare` finds; an `error` where it could not be run."""
    found: dict[str, dict[str, Any]] = {mode: {} for mode in wanted}
    names = list(dict.fromkeys(name for families in wanted.values() for name in families))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_CACHE_ROOT"] = f"{folder}/compiled"
        expected = {name: Expected(name, Path(folder) / f"{i}" / "model") for i, name in enumerate(names)}
        for mode, families in wanted.items():
            for name in families:
                try:
                    with in_process():
                        result = await compare(expected[name], MODES[mode])
                except Exception:
                    result = {"error": traceback.format_exc()}
                found[mode][name] = result
                print(mode, name, result.get("error", f"{result.get('seconds')} s"), file=sys.stderr, flush=True)
    return found


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    parser = argparse.ArgumentParser()
    parser.add_argument("wanted", nargs="*", help="MODE:FAMILY,FAMILY; default: everything")
    parser.add_argument("--out", type=Path, help="write JSON")
    parser.add_argument("--report", type=Path, help="write Markdown")
    arguments = parser.parse_args()
    wanted = {mode: families.split(",") for mode, families in (item.split(":") for item in arguments.wanted)}
    found = asyncio.run(measure(wanted or {mode: HALF if mode == "bfloat16" else list(CONFIGS) for mode in MODES}))
    if arguments.out:
        arguments.out.write_text(json.dumps(found))
    if arguments.report:
        from tests.families.report import report

        arguments.report.write_text(report(found))


if __name__ == "__main__":
    main()
