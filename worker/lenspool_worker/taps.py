"""Taps: the places in the model where rows are copied and edited.

Each is an opaque custom op over whole tensors with declared mutation, called from module hooks. torch.compile keeps it
where it stands, and never looks inside. With no plan for the step a tap returns at once.

Nothing raised in a tap reaches vLLM: what goes wrong is charged to the job whose rows they are.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import torch

from lenspool_worker.batch import EditSlice, Slice, StepPlan
from lenspool_worker.capture import gather

log = logging.getLogger(__name__)


class Taps:
    """Sites of this process's model, and the plan of the step that is running."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.plan: StepPlan | None = None

    def site(self, name: str) -> int:
        """Number of a new site."""
        self.names.append(name)
        return len(self.names) - 1

    def plain(self, tensor: torch.Tensor, site: int) -> None:
        """Edit and copy rows of a tensor `[tokens, width]` in place."""
        if self.plan is None:
            return
        for piece in self.plan.edits.get(site, ()):
            self._edit(piece, tensor, None)
        slices = self.plan.captures.get(site)
        if slices:
            self._copy(site, slices, tensor, None)

    def stream(self, hidden: torch.Tensor, residual: torch.Tensor, site: int) -> None:
        """Edit and copy rows of the residual stream, which is the sum of the two tensors `[tokens, width]`.

        An edit writes the new stream into `residual` and zero into `hidden`, so that no cancellation of two large
        numbers can hurt it.
        """
        if self.plan is None:
            return
        for piece in self.plan.edits.get(site, ()):
            self._edit(piece, hidden, residual)
        slices = self.plan.captures.get(site)
        if slices:
            self._copy(site, slices, hidden, residual)

    def _edit(self, piece: EditSlice, tensor: torch.Tensor, residual: torch.Tensor | None) -> None:
        at = slice(piece.start, piece.stop)
        try:
            rows = tensor[at].float()
            if residual is None:
                tensor[at] = piece.edit.apply(rows).to(tensor.dtype)
            else:
                residual[at] = piece.edit.apply(rows + residual[at].float()).to(residual.dtype)
                tensor[at] = 0
        except Exception as error:
            log.exception("an edit failed")
            piece.job.fail(f"{piece.edit.op}: {error}")

    def _copy(self, site: int, slices: list[Slice], tensor: torch.Tensor, residual: torch.Tensor | None) -> None:
        try:
            spans = [(s.start, s.stop) for s in slices]
            rows = gather(tensor, spans)
            if residual is not None:
                rows += gather(residual, spans)
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
for _device in ("CPU", "CUDA"):
    _library.impl("tap", TAPS.plain, _device)
    _library.impl("tap_stream", TAPS.stream, _device)


@torch.library.register_fake("lenspool::tap", lib=_library)
def _fake_tap(tensor: torch.Tensor, site: int) -> None:
    return None


@torch.library.register_fake("lenspool::tap_stream", lib=_library)
def _fake_tap_stream(hidden: torch.Tensor, residual: torch.Tensor, site: int) -> None:
    return None


OPS = ("lenspool::tap", "lenspool::tap_stream")
tap = torch.ops.lenspool.tap
tap_stream = torch.ops.lenspool.tap_stream


def source_hash() -> str:
    """Hash of the code that decides where taps stand; part of vLLM's compile key, so that no graph without them, or
    with older ones, is ever taken from its cache.
    """
    digest = hashlib.sha256()
    for name in ("taps.py", "families.py"):
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]
