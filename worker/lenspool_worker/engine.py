"""The engine as the pool worker sees it: run a request, and its rows are in the store."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lenspool.errors import EngineFailed, InvalidJob, LenspoolError
from lenspool.hooks import template
from lenspool.job import GENERATION
from lenspool_cache import Run, Store
from lenspool_cache import ranges as rg
from lenspool_worker.boot import booted
from lenspool_worker.generation import GREEDY, Follower, generated, parameters
from lenspool_worker.instrument import SPEC
from lenspool_worker.parallel import joined
from lenspool_worker.plugins import keep_out_taps
from lenspool_worker.request_checks import RequestChecks
from lenspool_worker.requests import CaptureGroup, EngineRequest, EngineResult, needs_tokens, wire
from lenspool_worker.verdicts import Verdicts, gone, wanted

log = logging.getLogger(__name__)

_CHECK_TOKENS = 8
_SHUTDOWN_S = 20.0
_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
"""Relative L2 error that a sum of two tensors of a dtype may have in the check at boot."""


class Engine:
    """An instrumented vLLM engine; its worker process writes captured rows into the store.

    Parameters
    ----------
    model
        Model folder.
    store
        Where rows go.
    options
        Arguments of vLLM's `AsyncEngineArgs`, over lenspool's defaults (eager, the checkpoint's dtype).

    Attributes
    ----------
    hooks
        After `start`: the fields of `lenspool_worker.families.Site` for each hook that is served.
    refusals
        After `start`: hook, `{layer}` in place of its layer -> why it is not served (in some layers).
    info
        After `start`: architecture, sizes, dtype and numerics.
    """

    def __init__(self, model: str, store: Store, options: dict[str, Any] | None = None) -> None:
        self._model = Path(model)
        self._store = store
        self._options = dict(options or {})
        self._llm: Any = None
        self._verdicts = Verdicts()
        self._numbers = itertools.count()
        self._epoch = 0
        self.hooks: list[dict[str, Any]] = []
        self.refusals: dict[str, str] = {}
        self.info: dict[str, Any] = {}

    async def start(self) -> None:
        """Boot vLLM, connect its worker process to the store, and check that every tap fires; again after a `stop`.

        Raises
        ------
        EngineFailed
            With the reason; nothing keeps running.
        """
        try:
            await self._start()
        except BaseException as error:
            await self.stop()
            if isinstance(error, LenspoolError) or not isinstance(error, Exception):
                raise
            raise EngineFailed(f"the engine did not start: {error}") from error

    async def _start(self) -> None:
        for name, value in (("VLLM_NO_USAGE_STATS", "1"), ("VLLM_LOGGING_LEVEL", "WARNING")):
            os.environ.setdefault(name, value)
        keep_out_taps()
        from vllm.v1.engine.async_llm import AsyncLLM  # heavy

        from lenspool_worker.settings import describe, engine_arguments

        arguments = engine_arguments(self._model, self._options)
        self._verdicts = Verdicts()
        await self._verdicts.open()
        self._llm = await booted(lambda: AsyncLLM.from_engine_args(arguments), again=bool(self.info))
        self.info = describe(self._llm.vllm_config)
        self._verdicts.processes = self._llm.vllm_config.parallel_config.world_size
        described = joined(await self._llm.collective_rpc("lenspool_describe"))
        if described["refusal"]:
            raise EngineFailed(described["refusal"])
        self.hooks, self.refusals = described["hooks"], described["refusals"]
        self._index()
        connect = self._llm.collective_rpc("lenspool_connect", args=(self._verdicts.path, str(self._store.path)))
        await asyncio.gather(connect, self._verdicts.connected())
        await self._check(known=described["known"])

    def _index(self) -> None:
        """Find hooks by their names."""
        self._checks = RequestChecks(self.hooks, self.info, self._store, text=self._text)

    async def _check(self, *, known: bool) -> None:
        """Run a few tokens over all hooks, and have the worker process look at the rows.

        Of a family that is not known, hooks that turn out wrong are refused, and the others served.
        """
        names = [hook["name"] for hook in self.hooks]
        count = min(_CHECK_TOKENS, self.info["max_model_len"] - 1)
        tokens = [1 + i * 7 % (self.info["vocab_size"] - 1) for i in range(count)]
        group = CaptureGroup(tuple(names), ((0, count),))
        request = EngineRequest("check", tokens, (group,), [], None, Run({"check": True}))
        verdict = {"op": "check", "hooks": names, "length": count, "tolerance": _TOLERANCE[self.info["dtype"]]}
        _, answer = await self._execute(request, lambda _: verdict)
        problems = answer["problems"]
        if not known:
            for name, text in answer["suspects"].items():
                self.refusals.setdefault(template(name), f"in this model, whose family is not known, {text}")
            self.hooks = [hook for hook in self.hooks if template(hook["name"]) not in self.refusals]
            self._index()
            problems = [] if any(name.endswith("hook_resid_post") for name in self._checks.sites) else problems
        if problems:
            raise EngineFailed("the check at boot failed: " + "; ".join(problems[:5]))

    @property
    def alive(self) -> bool:
        """Whether requests can run."""
        return self._llm is not None and not self._llm.errored and not self._verdicts.lost

    async def stop(self) -> None:
        """Stop vLLM's processes; requests that still run fail, and may run elsewhere."""
        if self._llm is not None:
            from vllm.v1.engine.exceptions import EngineDeadError

            llm, self._llm = self._llm, None
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # or it would report the end as a failure
            llm.output_processor.propagate_error(EngineDeadError())
            # vLLM kills what takes longer; the exit of its processes, one after the other, takes seconds of work
            await asyncio.to_thread(llm.shutdown, _SHUTDOWN_S)
        await self._verdicts.close()  # last: the worker process takes it for the end of this one

    async def stats(self) -> dict[str, int]:
        """Counters of the worker process: `steps`, `tokens`, `max_batch`, `preemptions`, `live`, `held_bytes`, ...

        Asked of its sink, not through vLLM, whose worker spins at full speed for a second after every call.
        """
        if not self.alive:
            raise gone()
        answer = await self._verdicts.send(f"stats#{next(self._numbers)}", {"op": "stats"})
        counts: dict[str, int] = answer["stats"]
        return counts

    async def run(self, request: EngineRequest, follower: Follower | None = None) -> EngineResult:
        """Run a request; when this returns, all its rows are in the store under its run.

        Cancelling it aborts the request in vLLM and drops its rows. A follower hears of a generation's tokens.

        Raises
        ------
        InvalidJob
            The request itself is wrong; vLLM has not seen it.
        EngineFailed
            Rows are missing, or the engine died (then `requeue` is set: another worker may run it).
        """
        self._checks.check(request)
        began = time.monotonic()

        several = self._verdicts.processes > 1
        document: dict[str, Any] = {"op": "commit", "captures": wire(request.captures), "run": request.run.document}

        def commit(ended: Any) -> dict[str, Any]:
            output, sampling = ended.outputs[0], request.sampling
            document["length"] = len(request.tokens) + (len(output.token_ids) - 1 if sampling else 0)
            document["entries"] = (
                {GENERATION: generated(ended, output, sampling, has_text=self._text)} if sampling else {}
            )
            return {**document, "entries": {}} if several else document

        output, answer = await self._execute(request, commit, follower)
        expected = sum(map(rg.count, wanted(document["captures"], document["length"]).values()))
        if answer["rows"] != expected:
            raise EngineFailed(f"{answer['rows']} of {expected} rows were stored")
        if several and request.sampling:  # readers take it for the end: only when all processes have stored their rows
            await self._verdicts.send(request.job_id, {**document, "op": "store"}, ranks=[0])
        return EngineResult(
            token_ids=list(output.token_ids) if request.sampling else [],
            text=output.text if request.sampling and self._text else None,
            finish_reason=output.finish_reason if request.sampling else None,
            computed_rows=answer["rows"],
            run_s=time.monotonic() - began,
        )

    @property
    def _text(self) -> bool:
        return not self._llm.vllm_config.model_config.skip_tokenizer_init

    async def _execute(
        self, request: EngineRequest, verdict: Callable[[Any], dict[str, Any]], follower: Follower | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Run a request in vLLM, then send the verdict on its output; on any other way out its rows are dropped."""
        if not self.alive:
            raise gone()
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        tag = f"{request.job_id}#{next(self._numbers)}"
        prompt = tokens_input(request.tokens)  # of an edited run KV is shared by what `scheduling` puts into its keys
        decided, epoch = False, self._epoch
        if follower is not None:
            follower.ask = lambda: self._show_progress(tag, follower)
        try:
            step = output = None
            chosen = self._sampling(request, tag, progress=follower is not None and follower.wanted)
            async for step in self._llm.generate(prompt, chosen, tag):
                output = step.outputs[0]
                if follower is not None and output.finish_reason is None:
                    follower.tell(output.token_ids, output.text)
            if output is None or output.finish_reason not in ("stop", "length"):
                raise EngineFailed(f"vLLM ended the request with {output and output.finish_reason!r}")
            if request.interventions and epoch != self._epoch:
                error = EngineFailed("it may have read keys and values that a failed edit has left")
                error.retryable = error.requeue = True  # type: ignore[attr-defined]
                raise error
            answer = self._verdicts.send(tag, verdict(step))
            decided = True
            return output, await answer
        except EngineDeadError as error:
            raise gone() from error
        except EngineFailed:
            if decided and request.interventions:
                self._epoch += 1  # what the run has left in the prefix cache is not what its edits would have made
            raise
        except (EngineGenerateError, VLLMClientError, ValueError) as error:
            if request.sampling and "json_schema" in request.sampling and isinstance(error, VLLMClientError):
                raise InvalidJob("json_schema", str(error), "a schema that the engine's grammar knows") from None
            raise EngineFailed(f"vLLM refused the request: {error}") from error
        finally:
            if follower is not None:
                follower.ask = None
            if not decided:
                self._verdicts.send(tag, {"op": "discard"}).add_done_callback(self._discarded)

    def _discarded(self, answer: asyncio.Future[dict[str, Any]]) -> None:
        """Take note of an edit that had failed in a run that was given up."""
        if not answer.cancelled() and answer.exception() is None and answer.result().get("failed"):
            self._epoch += 1

    def _show_progress(self, tag: str, follower: Follower) -> None:
        """Have vLLM say from now on what a running request has generated so far, and not at its end only."""
        from vllm.sampling_params import RequestOutputKind

        if self._llm is None or follower.ask is None:
            return
        processor = self._llm.output_processor
        request_ids = processor.external_req_ids.get(tag, ())
        for request_id in request_ids:
            processor.request_states[request_id].output_kind = RequestOutputKind.CUMULATIVE
        if not request_ids:  # still on its way into vLLM
            asyncio.get_running_loop().call_later(0.02, self._show_progress, tag, follower)

    def _sampling(self, request: EngineRequest, tag: str, *, progress: bool) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling or GREEDY
        first = min(
            (
                0 if site["prefix"] else start
                for group in request.captures
                for site, ranges in (self._checks.read(name, group) for name in group.hooks)
                for start, _ in ranges
            ),
            default=None,
        )
        # cached positions are not run and yield no rows: the scheduler reads the cache up to the first that has to
        whole = request.fresh or first == 0 or "prompt_logprobs" in sampling
        return SamplingParams(
            **parameters(sampling),
            detokenize=self._text and request.sampling is not None,
            output_kind=RequestOutputKind.CUMULATIVE if progress else RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=whole,
            extra_args={
                SPEC: {
                    "tag": tag,
                    "first": first,
                    "captures": wire(request.captures),
                    "interventions": request.interventions,
                    "epoch": self._epoch,
                    "tokens": request.tokens if needs_tokens(request.captures) else [],
                }
            },
        )
