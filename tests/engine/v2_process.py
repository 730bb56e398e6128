"""A process that runs requests on one of vLLM's model runners, in-process, and keeps what the instrument saw.

`python v2_process.py MODEL OUT V1|V2|async BLOCKS`; the V2 runner's kernels are interpreted: this machine has no GPU.
`async` is V1 with the scheduler a step ahead of the model, as on a GPU, which vLLM does not do on a CPU by itself.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np


def environment(runner: str) -> None:
    """Choose the runner; before vLLM is imported."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "V2" else "0"
    if runner == "V2":
        os.environ["TRITON_INTERPRET"] = "1"
        from triton.backends import backends

        driver = SimpleNamespace(is_active=lambda: True)
        backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)  # type: ignore[assignment]


def ahead() -> None:
    """Have vLLM schedule a step before it knows the tokens of the one before; CUDA's streams and events do nothing."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)  # type: ignore[method-assign, assignment]
    nothing = mock.MagicMock()  # of CUDA
    for name in ("Event", "Stream", "stream", "current_stream"):
        setattr(torch.cuda, name, nothing)


def requests(vocabulary: int) -> list[tuple[list[int], int, list[dict[str, Any]]]]:
    """Prompt, tokens to generate, edits. Every fifth ends at a token that nobody can foresee."""
    random = np.random.default_rng(11)
    made = []
    for i, length in enumerate([30, 5, 29, 62, 28, 31, 93, 27, 60, 26]):  # many soon need another block of the cache
        prompt = [int(t) for t in random.integers(1, vocabulary, length)]
        hook = ["blocks.1.hook_resid_mid", "blocks.2.hook_resid_pre", "ln_final.hook_out"][i % 3]
        edit = {"hook": hook, "op": "scale", "factor": -2.0, "ranges": [[1, 3], [len(prompt), None]]}
        made.append((prompt, 8, [edit] * (i % 2)))
    return made


def main(model: str, out: str, runner: str, blocks: int) -> None:
    """Run them all at once, and save each hook's rows, the tokens and the counters."""
    environment(runner)
    if runner == "async":
        ahead()
    from vllm import LLM, SamplingParams

    from lenspool_worker.instrument import SPEC

    llm = LLM(
        model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        distributed_executor_backend="uni",
        worker_cls="lenspool_worker.vllm_worker.LensWorker",
        max_model_len=128,
        max_num_batched_tokens=64,
        block_size=32,
        num_gpu_blocks_override=blocks,
        kv_cache_memory_bytes=64 * 2**20,
        seed=0,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert (type(scheduler).__name__ == "AsyncScheduler") == (runner == "async"), scheduler
    worker = llm.llm_engine.model_executor.driver_worker.worker
    kind = type(worker.model_runner)
    assert hasattr(kind, "prepare_inputs") == (runner == "V2"), kind
    hooks = [site["name"] for site in worker.lenspool_describe()["hooks"]]
    instrument = worker._instrument
    taps = [name for name in hooks if name not in instrument.derived]
    cases = requests(1000)
    prompts, sampling = [], []
    for i, (prompt, count, edits) in enumerate(cases):
        salt = {"cache_salt": str(edits)} if edits else {}
        prompts.append({"prompt_token_ids": prompt, **salt})
        spec = {"tag": str(i), "captures": [[taps, [[0, None]]]], "interventions": edits}
        sampling.append(
            SamplingParams(
                max_tokens=count,
                temperature=0.0,
                ignore_eos=True,
                stop_token_ids=list(range(500)) if i % 5 == 4 else None,
                detokenize=False,
                skip_reading_prefix_cache=True,
                extra_args={SPEC: spec},
            )
        )
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    llm.llm_engine.step()  # ended requests are told with the next step
    arrays: dict[str, np.ndarray] = {}
    for i, (prompt, _, _) in enumerate(cases):
        tokens = list(outputs[i].outputs[0].token_ids)
        arrays[f"{i}/tokens"] = np.array(tokens)
        rows = instrument.take(str(i))
        assert rows.error is None, rows.error
        for name in taps:
            arrays[f"{i}/{name}"] = rows.assemble(name, [(0, len(prompt) + len(tokens) - 1)])[0][1]
    stats = instrument.stats()
    assert stats["live"] == stats["held_bytes"] == stats["tracked"] == 0, stats
    np.savez(out, preemptions=stats["preemptions"], mixed=stats["mixed_steps"], **arrays)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
