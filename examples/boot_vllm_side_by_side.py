"""TransformerLens's `boot_vllm` and lenspool's `boot_pool`: the same calls, the same numbers, and a table of times.

    python examples/boot_vllm_side_by_side.py [--model DIR] [--prompts 32]

Each side runs in a process of its own, one after the other, on the same cores. `boot_vllm` is booted twice, as it does
edits by position and batches in two modes that exclude each other; both are eager, as is the pool.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

LAYER = 5
HOOK = f"blocks.{LAYER}.hook_out"
BAND = 5e-5
"""Relative L2 distance: an edit of a fused pair by `boot_vllm` is off by a rounding, which later layers enlarge."""
TEXT = "The capital of France is"
SIDES = ("boot_vllm, positions", "boot_vllm, batches", "boot_pool")
Steps = dict[str, tuple[float, np.ndarray]]


def boot(side: str, model: str) -> Any:
    """The bridge of a side, in float32."""
    import torch

    shared = {"dtype": torch.float32, "max_model_len": 512}
    if side == "boot_pool":
        from lenspool.integrations.transformer_lens import boot_pool

        return boot_pool(model, store=tempfile.mkdtemp(prefix="lenspool-"), **shared)
    from transformer_lens.model_bridge.sources.vllm import boot_vllm

    if side == "boot_vllm, batches":
        return boot_vllm(model, enable_batching=True, **shared)
    return boot_vllm(model, enable_position_interventions=True, enforce_eager=True, **shared)


def run(side: str, model: str, prompts: list[list[int]]) -> Steps:
    """The workflow of the documentation; seconds and numbers of each step."""
    steps: Steps = {}

    def step(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        steps[name] = (time.perf_counter() - began, np.asarray(result) if hasattr(result, "shape") else np.zeros(1))
        return result

    bridge = step("boot", lambda: boot(side, model))
    tokens = bridge.to_tokens(TEXT)
    single, batched = side != "boot_vllm, batches", side != "boot_vllm, positions"
    if single:
        bridge.forward(tokens + 2)  # both are warm, and the pool has stored nothing of what follows
        step("cache of all blocks", lambda: stream(bridge, tokens + 1))
        step("the same again", lambda: stream(bridge, tokens + 1))
        step("loss", lambda: bridge.forward(tokens, return_type="loss"))
        step("scale 2", lambda: bridge.forward(tokens, intervene={HOOK: {"op": "scale", "factor": 2.0}}))
        by_position = {"op": "set", "value": 1.5, "pos": [1, 3]}
        step("set at two positions", lambda: bridge.forward(tokens, intervene={HOOK: by_position}))
        step("clean again", lambda: bridge.forward(tokens))
    if side == "boot_vllm, positions":
        step("many prompts, one hook", lambda: np.concatenate([rows(bridge, [prompt]) for prompt in prompts]))
    if batched:
        step("many prompts, one hook, one call", lambda: rows(bridge, prompts))
        step("the same call again", lambda: rows(bridge, prompts))
    bridge.close()
    return steps


def stream(bridge: Any, tokens: Any) -> Any:
    """The residual stream behind every block."""
    _, cache = bridge.run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_resid_post"))
    return cache.stack_activation("resid_post")


def rows(bridge: Any, prompts: list[list[int]]) -> np.ndarray:
    """One hook's rows of prompts of one length."""
    import torch

    options = {"names_filter": HOOK, "return_type": None, "return_logits": False}
    return np.asarray(bridge.run_with_cache(torch.tensor(prompts), **options)[1][HOOK])


def measured(side: str, model: str, count: int) -> Steps:
    """Run a side in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps.npz"
        command = [
            sys.executable,
            __file__,
            "--model",
            model,
            "--prompts",
            str(count),
            "--side",
            side,
            "--out",
            str(out),
        ]
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "WANDB_MODE": "disabled", **os.environ}
        # one core does for all of them, and vLLM's cache of keys and values is small on both sides
        environment |= {"VLLM_CPU_KVCACHE_SPACE": environment.get("VLLM_CPU_KVCACHE_SPACE", "1")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{side} failed:\n{done.stderr[-4000:]}")
        with np.load(out) as arrays:
            return {name: (float(arrays[f"{name}|s"]), arrays[name]) for name in arrays.files if "|" not in name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder (default: SmolLM2-135M, prepared once)")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model is None:
        from lenspool_worker.demo_model import default_folder, prepare

        options.model = str(prepare(default_folder()))
    if options.side:
        prompts = np.random.default_rng(0).integers(100, 40000, (options.prompts, 64)).tolist()
        steps = run(options.side, options.model, prompts)
        arrays: dict[str, Any] = {name: array for name, (_, array) in steps.items()}
        arrays |= {f"{name}|s": seconds for name, (seconds, _) in steps.items()}
        np.savez(options.out, **arrays)
        return
    results = {side: measured(side, options.model, options.prompts) for side in SIDES}
    report(results)


def report(results: dict[str, Steps]) -> None:
    """Seconds of each step on each side, and how far the numbers are apart."""
    names = dict.fromkeys(name for side in SIDES for name in results[side])
    print(f"{'seconds':34}" + "".join(f"{side:>24}" for side in SIDES) + f"{'relative L2':>14}")
    worst = 0.0
    for name in names:
        cells = [f"{results[side][name][0]:24.3f}" if name in results[side] else f"{'-':>24}" for side in SIDES]
        arrays = [results[side][name][1] for side in SIDES if name in results[side]]
        apart = max((apart_by(array, arrays[0]) for array in arrays[1:]), default=0.0)
        worst = max(worst, apart)
        print(f"{name:34}" + "".join(cells) + (f"{apart:14.1e}" if name != "boot" and len(arrays) > 1 else ""))
    same = worst < BAND
    print("the same numbers" if same else "NOT the same numbers", f"(largest relative L2 distance {worst:.1e})")
    sys.exit(not same)


def apart_by(a: np.ndarray, b: np.ndarray) -> float:
    """Relative L2 distance."""
    return float(np.linalg.norm(a.astype(float) - b)) / max(float(np.linalg.norm(b.astype(float))), 1e-30)


if __name__ == "__main__":
    main()
