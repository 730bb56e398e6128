"""What would fail inside vLLM's worker process is refused before vLLM sees it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np

from lenspool import entries
from lenspool.card import HookInfo
from lenspool.edit_forms import array_of, check_array, check_edits
from lenspool.errors import InvalidJob, UnknownHook
from lenspool_cache import Store
from lenspool_cache import ranges as rg
from lenspool_cache.codec import dtype_of
from lenspool_cache.ranges import OpenRange
from lenspool_worker.requests import CaptureGroup, EngineRequest

_COMPUTED_BYTES = 2**30


class RequestChecks:
    """The checks of one engine.

    Parameters
    ----------
    hooks
        The fields of `lenspool_worker.families.Site` for each hook that is served.
    info
        Sizes and dtype of the engine.
    store
        Where arrays are.
    text
        Whether the engine has a tokenizer.

    Attributes
    ----------
    sites
        The hooks by name.
    """

    def __init__(self, hooks: Iterable[dict[str, Any]], info: Mapping[str, Any], store: Store, *, text: bool) -> None:
        names = [field.name for field in fields(HookInfo)]
        self.sites = {hook["name"]: hook for hook in hooks}
        self._infos = {hook["name"]: HookInfo(**{name: hook[name] for name in names}) for hook in self.sites.values()}
        self._info, self._store, self._text = info, store, text
        self.shape_of = lru_cache(maxsize=4096)(self._shape)

    def check(self, request: EngineRequest) -> None:
        """Refuse what would fail inside vLLM's worker process.

        Raises
        ------
        InvalidJob
            Or a subclass.
        """
        vocabulary, longest = self._info["vocab_size"], self._info["max_model_len"]
        length = len(request.tokens) + (request.sampling["max_tokens"] if request.sampling else 1)
        if not request.tokens or length > longest:
            raise InvalidJob("prompt", f"prompt and generation take {length} tokens", f"2..{longest}")
        for token in request.tokens:
            if not 0 <= token < vocabulary:
                raise InvalidJob("prompt", f"token id {token} is outside the vocabulary", f"0..{vocabulary - 1}")
        for group in request.captures:
            for name in group.hooks:
                self.read(name, group)
            self._check_ranges(group.ranges, request, "captures.ranges")
        self._check_computed(request)
        check_edits(request.interventions, self._infos, request.length, generating=request.sampling is not None)
        for i, document in enumerate(request.interventions):
            self._check_array(document, f"interventions[{i}].value")
        for field, others in (("stop", "no stop strings"), ("json_schema", "no schema")):
            if request.sampling and request.sampling.get(field) and not self._text:
                raise InvalidJob(field, "the model was served without a tokenizer", others)

    def _check_computed(self, request: EngineRequest) -> None:
        """Bound the bytes of hooks that are computed when the job ends (attention patterns grow with the square)."""
        length, size = request.length, 0
        for group in request.captures:
            for site, ranges in (self.read(name, group) for name in group.hooks):
                if site["computed"]:
                    rows = rg.count(rg.close(ranges, length))
                    width = math.prod(length if dim == 0 else dim for dim in site["dims"])
                    size += rows * width * dtype_of(self._info["dtype"]).itemsize
        if size > _COMPUTED_BYTES:
            raise InvalidJob(
                "hooks",
                f"attention patterns, scores and per-head results take {size} bytes",
                f"at most {_COMPUTED_BYTES} in a job: ask for fewer layers or positions",
            )

    def read(self, name: str, group: CaptureGroup) -> tuple[dict[str, Any], Sequence[OpenRange]]:
        """The hook whose rows an entry is made of, and where."""
        if not entries.is_readout(name):
            return self._hook(name, "captures"), group.ranges
        entry = entries.parse(name, "captures")
        return self._hook(entry.hook, "captures"), entry.reads(group.ranges)

    def _hook(self, name: str, field: str) -> dict[str, Any]:
        try:
            return self.sites[name]
        except KeyError:
            raise UnknownHook(name, field=field) from None

    def _check_ranges(self, ranges: Sequence[Sequence[int | None]], request: EngineRequest, field: str) -> None:
        limit = request.length
        for start, stop in ranges:
            closed = stop if stop is not None else (start or 0) + 1 if request.sampling else -1
            if start is None or not 0 <= start < closed or (stop is not None and stop > limit):
                raise InvalidJob(field, f"got [{start}, {stop}]", f"[start, stop) within 0..{limit}")

    def _check_array(self, document: Mapping[str, Any], field: str) -> None:
        digest = array_of(document)
        if digest is None:
            return
        try:
            shape = self.shape_of(digest)
        except KeyError:
            raise InvalidJob(field, f"the store does not have the array {digest[:16]}") from None
        except ValueError as error:
            raise InvalidJob(field, str(error), "finite float32 numbers") from None
        check_array(document, self._infos[document["hook"]], shape, field)

    def _shape(self, digest: str) -> tuple[int, ...]:
        """Shape of an array whose numbers an edit can take."""
        array = self._store.get_array(digest)
        if array.dtype != np.float32 or not np.isfinite(array).all():
            raise ValueError(f"is {array.dtype}, or holds NaN or Infinity")
        return tuple(array.shape)
