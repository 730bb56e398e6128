"""The instrument of one vLLM worker process: which requests are watched, and what each has yielded.

The step thread (vLLM's) plans and takes rows; the sink's thread takes finished jobs away. A job's spec arrives with its
request; nothing that is wrong with it may reach vLLM.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lenspool import entries
from lenspool.entries import LOGITS
from lenspool_cache import Store
from lenspool_cache.ranges import OpenRange
from lenspool_worker.batch import Tracked, plan_step
from lenspool_worker.capture import JobRows
from lenspool_worker.derived import DerivedHooks, group
from lenspool_worker.edits import Edit, from_document
from lenspool_worker.parallel import Place
from lenspool_worker.readouts import LOGIT_ROWS, Readouts
from lenspool_worker.taps import Taps

log = logging.getLogger(__name__)

SPEC = "lenspool"
"""Key of a request's spec in vLLM's `SamplingParams.extra_args`."""


class Instrument:
    """Jobs of one process.

    Parameters
    ----------
    taps
        Where rows come from.
    device
        Where the model runs.
    derived
        Hooks that are computed from others when a job ends.
    readouts
        What is read from rows that are then dropped.
    place
        Of this process among those of the model.
    """

    def __init__(
        self,
        taps: Taps,
        device: torch.device,
        derived: DerivedHooks | None = None,
        readouts: Readouts | None = None,
        place: Place = Place(),  # noqa: B008
    ) -> None:
        self.place = place
        self._device = device
        self._taps = taps
        self.derived = derived if derived is not None else DerivedHooks()
        self.readouts = readouts if readouts is not None else Readouts(self.derived, {}, None, None, device)
        self._sites = {name: number for number, name in enumerate(taps.names)}
        self._tracked: dict[str, Tracked] = {}  # by vLLM's request id
        self._jobs: dict[str, JobRows] = {}  # by tag, until the verdict
        self._discarded: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self.counts = {"steps": 0, "tokens": 0, "max_batch": 0, "preemptions": 0, "mixed_steps": 0}

    # -- vLLM's step thread

    def schedule(self, output: Any) -> None:
        """Note the requests that a step begins, resumes or ends, from vLLM's scheduler output."""
        for request_id in output.finished_req_ids:
            self._tracked.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            params = new.sampling_params
            spec = (params.extra_args or {}).get(SPEC) if params is not None else None
            # the V2 runner presents a preempted request as a new one: what it has yielded stays
            if spec is not None and new.req_id not in self._tracked:
                self._begin(new.req_id, spec)
        self.counts["preemptions"] += len(output.preempted_req_ids or ())

    def _begin(self, request_id: str, spec: Mapping[str, Any]) -> None:
        tag = str(spec["tag"])
        rows = JobRows(tag, keep=self.place.writes)
        with self._lock:
            if tag not in self._discarded:
                self._jobs[tag] = rows
            elif self.place.size > 1:
                rows.keep = False  # the other processes may not have heard of it: what it needs of this one goes on
            else:
                return
        captures: list[tuple[list[int], list[OpenRange]]] = []
        edits: list[tuple[int, Edit]] = []
        try:
            asked = [
                ([name for name in names if self.serves(name)], [(a, b) for a, b in ranges])
                for names, ranges in spec["captures"]
            ]
            captures = group(self.readouts.sources(asked), self._sites)
            rows.readers = self.readouts.readers(rows, asked, spec.get("tokens", ()))
            for document in spec["interventions"]:
                if self.serves(document["hook"]):
                    site = self._sites[document["hook"]]
                    edits.append((site, from_document(document, self.readouts.arrays, self._taps.width(site))))
        except Exception as error:
            log.exception("job %s cannot be set up", tag)
            rows.fail(f"{type(error).__name__}: {error}")
        if spec["interventions"] and not self.place.agreed(rows.error is None, self._device):
            edits = []
            rows.fail("another process of the model could not set the job up")
        self._tracked[request_id] = Tracked(rows, captures, edits)

    def serves(self, name: str) -> bool:
        """Whether a hook, or what a readout is read from, belongs to this process's layers."""
        hook = entries.parse(name).hook if entries.is_readout(name) else name
        return hook in self._sites or hook in self.derived

    def connect(self, store: Store) -> None:
        """Say where arrays of jobs come from."""
        self.readouts.arrays.store = store

    def plan(
        self, request_ids: Sequence[str], starts: Iterable[int], counts: Sequence[int], inputs: torch.Tensor
    ) -> None:
        """Plan the step that is about to run, from the batch as the runner has ordered it.

        Parameters
        ----------
        inputs
            Token ids of the batch's rows, on any device.
        """
        counts = [int(n) for n in counts]
        self.counts["steps"] += 1
        self.counts["tokens"] += sum(counts)
        self.counts["max_batch"] = max(self.counts["max_batch"], len(counts))
        self.counts["mixed_steps"] += 1 in counts and max(counts) > 1
        try:
            self._taps.plan = None
            if self._tracked:
                self._taps.plan = plan_step(
                    request_ids, starts, counts, self._tracked, lambda start, stop: inputs[start:stop].tolist()
                )
        except Exception as error:
            log.exception("a step could not be planned")
            self._taps.plan = None
            for tracked in self._tracked.values():
                tracked.rows.fail(f"planning: {error}")

    def finish(self, hidden: torch.Tensor | None, model: Any) -> None:
        """End the step: logits of the rows that were asked for, from the final norm's output `[tokens, d_model]`."""
        plan = self._taps.plan
        self._taps.plan = None
        if plan is None or hidden is None:
            return
        for piece in plan.captures.get(self._sites.get(LOGITS, -1), ()):
            try:
                for at in range(piece.start, piece.stop, LOGIT_ROWS):
                    rows = hidden[at : min(at + LOGIT_ROWS, piece.stop)]
                    with torch.inference_mode():
                        logits = self.place.together(model.compute_logits, rows)
                        if logits is not None:  # as in all but one process of a group
                            piece.job.add(LOGITS, piece.position + at - piece.start, logits)
                        piece.job.read()  # at once: the logits of a chunk are as large as all else
            except Exception as error:
                log.exception("logits failed")
                piece.job.fail(f"{LOGITS}: {error}")
        for tracked in self._tracked.values():
            try:
                with torch.inference_mode():
                    tracked.rows.read()
            except Exception as error:
                log.exception("a readout failed")
                tracked.rows.fail(f"readout: {error}")

    # -- the sink's thread

    def take(self, tag: str) -> JobRows | None:
        """Take a job's rows away, at its verdict."""
        with self._lock:
            rows = self._jobs.pop(tag, None)
            if rows is None:  # its request may still be on its way here
                self._discarded[tag] = None
                while len(self._discarded) > 10_000:
                    self._discarded.popitem(last=False)
        return rows

    def stats(self) -> dict[str, int]:
        """Counters, and what is held now: `live` jobs without a verdict, `tracked` requests that vLLM still has."""
        jobs = list(self._jobs.values())
        held = sum(job.bytes for job in jobs)
        return {**self.counts, "live": len(jobs), "tracked": len(self._tracked), "held_bytes": held}
