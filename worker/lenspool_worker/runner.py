"""The one place that knows vLLM's model runners (0.32), V1 and V2.

Both order the batch's rows themselves, after the scheduler; so the order is read where they have just fixed it: V1 in
`_prepare_inputs`, V2 in what `prepare_inputs` returns. Warm-up and profiling runs pass neither.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_pp_group

from lenspool_worker.instrument import Instrument


def attach(runner: Any, instrument: Instrument) -> None:
    """Have a runner tell the instrument of every step."""
    if hasattr(runner, "prepare_inputs"):
        _wrap_v2(runner, instrument)
    else:
        _wrap_v1(runner, instrument)
    _wrap_execution(runner, instrument)


def prepare_pipeline(runner: Any) -> None:
    """Allocate what a later stage of a pipeline receives: of the V1 runners, an eager one on CPU forgets it."""
    if not get_pp_group().is_first_rank and getattr(runner, "intermediate_tensors", runner) is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _wrap_v1(runner: Any, instrument: Instrument) -> None:
    prepare = runner._prepare_inputs

    def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: Any, *args: Any, **options: Any) -> Any:
        out = prepare(scheduler_output, num_scheduled_tokens, *args, **options)
        batch = runner.input_batch
        count = batch.num_reqs
        starts, counts = batch.num_computed_tokens_cpu[:count], num_scheduled_tokens[:count]
        instrument.plan(batch.req_ids[:count], starts, counts, runner.input_ids.gpu)
        return out

    runner._prepare_inputs = prepare_inputs


def _wrap_v2(runner: Any, instrument: Instrument) -> None:
    prepare = runner.prepare_inputs

    def prepare_inputs(*args: Any, **options: Any) -> Any:
        batch = prepare(*args, **options)
        instrument.plan(batch.req_ids, batch.num_computed_tokens_np, batch.num_scheduled_tokens, batch.input_ids)
        return batch

    runner.prepare_inputs = prepare_inputs


def _wrap_execution(runner: Any, instrument: Instrument) -> None:
    execute = runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **options: Any) -> Any:
        if not options.get("dummy_run"):
            instrument.schedule(scheduler_output)
        hidden = None
        try:
            out = execute(scheduler_output, *args, **options)
            state = getattr(runner, "execute_model_state", None)
            hidden = getattr(state, "hidden_states", None)
        finally:
            instrument.finish(hidden, runner.model)
        return out

    runner.execute_model = execute_model
