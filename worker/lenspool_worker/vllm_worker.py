"""vLLM's worker, with taps in its model: what `worker_cls` names."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_pp_group, get_tp_group
from vllm.platforms import current_platform

from lenspool_cache import Store
from lenspool_worker.families import Installation, UnsupportedModel, install
from lenspool_worker.instrument import Instrument
from lenspool_worker.leaving import leave_at_the_end, spare_the_heap
from lenspool_worker.parallel import Place
from lenspool_worker.readouts import Readouts
from lenspool_worker.runner import attach, prepare_pipeline
from lenspool_worker.sink import Sink
from lenspool_worker.taps import TAPS

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker


class LensWorker(Worker):
    """The platform's worker; taps go in right after the weights, before compilation and warm-up."""

    _installed: Installation | None = None
    _instrument: Instrument | None = None
    _sink: Sink | None = None
    _store: Store | None = None
    _place = Place()
    _refusal: str | None = None

    def load_model(self, *args: Any, **options: Any) -> None:
        """Load the weights, and install the taps."""
        super().load_model(*args, **options)
        model = self.model_runner.get_model()
        self._place = place()
        prepare_pipeline(self.model_runner)
        try:
            self._installed = install(model, TAPS, self._place)
        except UnsupportedModel as error:
            self._refusal = str(error)
            return
        widths = {site.name: site.width for site in self._installed.sites}
        readouts = Readouts(
            self._installed.derived, widths, model, self._installed.final_norm, self.device, self._place
        )
        self._instrument = Instrument(TAPS, self.device, self._installed.derived, readouts, self._place)
        attach(self.model_runner, self._instrument)

    # -- called by the parent; small JSON only

    def lenspool_describe(self) -> dict[str, Any]:
        """Hooks and why others are not served, or why there are none."""
        if self._installed is None:
            return {"refusal": self._refusal}
        return {
            "refusal": None,
            "writes": self._place.writes,
            "family": self._installed.family.name,
            "known": self._installed.family.known,
            "hooks": [asdict(site) for site in self._installed.sites],
            "refusals": self._installed.refusals,
        }

    def lenspool_connect(self, socket_path: str, store_path: str) -> None:
        """Open the store, and the way on which the parent's verdicts come."""
        assert self._instrument is not None
        self._store = Store(store_path)
        self._instrument.connect(self._store)
        # The parent closes the socket only when it has ended. vLLM's processes would not notice, and live for ever;
        # they end when this one does.
        self._sink = Sink(socket_path, self._instrument, self._store, lambda: os._exit(1), self.rank)
        leave_at_the_end()

    def shutdown(self) -> None:
        """Flush the store, and end."""
        spare_the_heap()
        if self._store is not None:
            self._store.close()
        super().shutdown()


def place() -> Place:
    """Where this process stands, as vLLM has set it up."""
    group, pipeline = get_tp_group(), get_pp_group()
    size = group.world_size
    gather = group.all_gather if size > 1 else None
    return Place(size, group.rank_in_group, pipeline.is_first_rank, pipeline.is_last_rank, gather)
