"""Taps: the places in the model where rows are copied and edited.

Each is an opaque custom op over whole tensors with declared mutation, called from module hooks; parts of a tensor
(queries in a joint projection) are taken inside the op, because an op that mutates a view of a tensor corrupts a
compiled model. torch.compile keeps an op where it stands, and never looks inside. With no plan for the step a tap
returns at once.

Nothing raised in a tap reaches vLLM: what goes wrong is charged to the job whose rows they are.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lenspool_worker.batch import EditSlice, Slice, StepPlan
from lenspool_worker.capture import gather
from lenspool_worker.parallel import Shard

log = logging.getLogger(__name__)

Reading = Callable[[torch.Tensor], torch.Tensor]
"""Computes rows `[n, ...]` from a tap's rows `[n, width]`."""


class Taps:
    """Sites of this process's model, and the plan of the step that is running."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.plan: StepPlan | None = None
        self._widths: list[int] = []
        self._shards: dict[int, Shard] = {}
        self._readings: dict[int, list[tuple[int, Reading]]] = {}

    def site(self, name: str, width: int, shard: Shard | None = None) -> int:
        """Number of a new site, whose rows have `width` numbers in this process; whole ones, without a shard."""
        self.names.append(name)
        self._widths.append(width)
        if shard is not None:
            self._shards[len(self.names) - 1] = shard
        return len(self.names) - 1

    def reading(self, name: str, base: int, compute: Reading, shard: Shard | None = None) -> int:
        """Number of a new site whose rows are computed from those of another one, after its edits."""
        number = self.site(name, 0, shard)
        self._readings.setdefault(base, []).append((number, compute))
        return number

    def width(self, site: int) -> int:
        """Numbers in a whole row of a site."""
        return self._widths[site] * (self._shards[site].parts if site in self._shards else 1)

    def plain(self, tensor: torch.Tensor, site: int) -> None:
        """Edit and copy rows of a tensor in place: `[tokens, width]`, or of any shape that flattens to it."""
        if self.plan is None:
            return
        try:
            rows = tensor if tensor.dim() == 2 else tensor.view(-1, self._widths[site])
        except RuntimeError as error:
            self._charge([site], error)
            return
        self._tap(site, rows, None)

    def stream(self, hidden: torch.Tensor, residual: torch.Tensor, site: int) -> None:
        """Edit and copy rows of the residual stream, which is the sum of the two tensors `[tokens, width]`.

        An edit writes the new stream into `residual` and zero into `hidden`, so that no cancellation of two large
        numbers can hurt it.
        """
        if self.plan is not None:
            self._tap(site, hidden, residual)

    def parts(self, tensor: torch.Tensor, groups: int, widths: Sequence[int], sites: Sequence[int]) -> None:
        """Edit and copy parts of a tensor `[tokens, groups * sum(widths)]`, each a site of its own.

        A part takes its width of each group in turn: one group for `q q q k v`, one per head for `q k v q k v`.
        """
        if self.plan is None:
            return
        try:
            whole = tensor.view(-1, groups, sum(widths))
        except RuntimeError as error:
            self._charge(sites, error)
            return
        starts = itertools.accumulate(widths, initial=0)
        for start, width, site in zip(starts, widths, sites, strict=False):  # there is one start more
            self._tap(site, whole[:, :, start : start + width], None)

    def experts(self, weights: torch.Tensor, indices: torch.Tensor, weights_site: int, indices_site: int) -> None:
        """Copy rows of the experts that a router has chosen, `[tokens, chosen]` each, by falling weight.

        Routers give them in no order; what the kernel takes stays as it is.
        """
        sites = [weights_site, indices_site]
        if self.plan is None or not any(site in self.plan.captures for site in sites):
            return
        try:
            order = weights.argsort(dim=-1, descending=True, stable=True)
            chosen = weights.gather(-1, order).float(), indices.gather(-1, order).int()
        except Exception as error:
            self._charge(sites, error)
            return
        for site, tensor in zip(sites, chosen, strict=True):
            self._tap(site, tensor, None)

    def _charge(self, sites: Sequence[int], error: Exception) -> None:
        """Fail the jobs that want something at sites whose tensor is not laid out as expected."""
        assert self.plan is not None
        log.error("a tap cannot read its tensor: %s", error)
        for site in sites:
            for piece in (*self.plan.edits.get(site, ()), *self.plan.captures.get(site, ())):
                piece.job.fail(f"{self.names[site]}: {error}")

    def _tap(self, site: int, tensor: torch.Tensor, residual: torch.Tensor | None) -> None:
        assert self.plan is not None
        for piece in self.plan.edits.get(site, ()):
            self._edit(site, piece, tensor, residual)
        slices = self.plan.captures.get(site)
        if slices:
            self._copy(site, slices, tensor, residual, None)
        for number, compute in self._readings.get(site, ()):
            slices = self.plan.captures.get(number)
            if slices:
                self._copy(number, slices, tensor, residual, compute)

    def _edit(self, site: int, piece: EditSlice, tensor: torch.Tensor, residual: torch.Tensor | None) -> None:
        shard = self._shards.get(site)
        try:
            at = tensor[piece.start : piece.stop]
            if shard is not None:  # an edit is of whole rows; each process keeps its part of the outcome
                whole = shard.whole(lambda: at.flatten(1).float())
                at.copy_(shard.own(piece.edit.apply(whole, piece.first)).view(at.shape))
                return
            rows = at.flatten(1).float()
            if residual is None:
                at.copy_(piece.edit.apply(rows, piece.first).view(at.shape))
            else:
                rest = residual[piece.start : piece.stop]
                rest.copy_(piece.edit.apply(rows + rest.float(), piece.first))
                at.zero_()
        except Exception as error:
            log.exception("an edit failed")
            piece.job.fail(f"{piece.edit.op}: {error}")

    def _copy(
        self,
        site: int,
        slices: list[Slice],
        tensor: torch.Tensor,
        residual: torch.Tensor | None,
        compute: Reading | None,
    ) -> None:
        spans = [(s.start, s.stop) for s in slices]

        def local() -> torch.Tensor:
            rows = gather(tensor, spans).flatten(1)
            if residual is not None:
                rows += gather(residual, spans)
            return rows if compute is None else compute(rows)

        shard = self._shards.get(site)
        try:
            rows = local() if shard is None else shard.whole(local)
            done = 0
            for piece in slices:
                count = piece.stop - piece.start
                piece.job.add(self.names[site], piece.position, rows[done : done + count])
                done += count
        except Exception as error:
            log.exception("a capture failed")
            for piece in slices:
                piece.job.fail(f"{self.names[site]}: {error}")


TAPS = Taps()
"""This process's taps: a process runs one model."""

_library = torch.library.Library("lenspool", "DEF")
_library.define("tap(Tensor(a!) tensor, int site) -> ()")
_library.define("tap_stream(Tensor(a!) hidden, Tensor(b!) residual, int site) -> ()")
_library.define("tap_parts(Tensor(a!) tensor, int groups, int[] widths, int[] sites) -> ()")
_library.define("tap_experts(Tensor(a!) weights, Tensor(b!) indices, int weights_site, int indices_site) -> ()")
for _device in ("CPU", "CUDA"):
    _library.impl("tap", TAPS.plain, _device)
    _library.impl("tap_stream", TAPS.stream, _device)
    _library.impl("tap_parts", TAPS.parts, _device)
    _library.impl("tap_experts", TAPS.experts, _device)


@torch.library.register_fake("lenspool::tap", lib=_library)
def _fake_tap(tensor: torch.Tensor, site: int) -> None:
    return None


@torch.library.register_fake("lenspool::tap_stream", lib=_library)
def _fake_tap_stream(hidden: torch.Tensor, residual: torch.Tensor, site: int) -> None:
    return None


@torch.library.register_fake("lenspool::tap_parts", lib=_library)
def _fake_tap_parts(tensor: torch.Tensor, groups: int, widths: Sequence[int], sites: Sequence[int]) -> None:
    return None


@torch.library.register_fake("lenspool::tap_experts", lib=_library)
def _fake_tap_experts(weights: torch.Tensor, indices: torch.Tensor, weights_site: int, indices_site: int) -> None:
    return None


OPS = ("lenspool::tap", "lenspool::tap_stream", "lenspool::tap_parts", "lenspool::tap_experts")
tap = torch.ops.lenspool.tap
tap_stream = torch.ops.lenspool.tap_stream
tap_parts = torch.ops.lenspool.tap_parts
tap_experts = torch.ops.lenspool.tap_experts


def source_hash() -> str:
    """Hash of the code that decides where taps stand; part of vLLM's compile key, so that no graph without them, or
    with older ones, is ever taken from its cache.
    """
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in (folder / "taps.py", folder / "parallel.py", *sorted((folder / "families").glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
