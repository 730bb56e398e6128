"""The processes that a model is spread over: which one this is, and how rows of all of them are put together.

Tensor parallelism gives each process of a group a part of every layer; a pipeline gives each group some of the layers.
All processes of a group plan the same steps from the same scheduler output, so they come to the same taps in the same
order. What needs all of them (`together`) must therefore happen in each of them, or in none: a process that cannot do
its part ends, as the others would wait for it for ever. vLLM then takes the engine for dead, and its jobs run again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where this process stands among those of the model.

    Attributes
    ----------
    size, rank
        Processes of this one's group, and its number among them.
    first, last
        Whether the group has the first and the last layer, with what comes before and after them.
    all_gather
        Puts the rows `[n, width]` of all processes of the group next to one another, `[n, size * width]`.
    """

    size: int = 1
    rank: int = 0
    first: bool = True
    last: bool = True
    all_gather: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def writes(self) -> bool:
        """Whether this process stores rows; in the others of its group they are equal."""
        return self.rank == 0

    def together(self, compute: Callable[..., Any], *args: Any) -> Any:
        """Compute something that all processes of the group take part in."""
        if self.size == 1:
            return compute(*args)
        try:
            return compute(*args)
        except Exception:
            log.critical("out of step with the other processes of the model", exc_info=True)
            os._exit(1)

    def agreed(self, fine: bool, device: torch.device) -> bool:
        """Whether something went well in all processes of the group, which all ask."""
        if self.size == 1 or self.all_gather is None:
            return fine
        return bool(self.together(self.all_gather, torch.full((1, 1), float(fine), device=device)).all())


@dataclass(frozen=True)
class Shard:
    """How rows are spread over a group: each process has one part of every row.

    Attributes
    ----------
    copies
        Neighbouring processes that have the same part, where there are fewer parts (key and value heads) than
        processes.
    """

    place: Place
    copies: int = 1

    @property
    def parts(self) -> int:
        """Different parts of a row."""
        return self.place.size // self.copies

    def whole(self, part: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Whole rows `[n, parts * width]`, of this process's part of them `[n, width]`."""
        return self.place.together(lambda: self._gather(part()))

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        assert self.place.all_gather is not None
        every = self.place.all_gather(part.contiguous())
        if self.copies == 1:
            return every
        return every.view(len(part), self.place.size, part.shape[1])[:, :: self.copies].flatten(1)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Take the part of whole rows that is this process's."""
        width = rows.shape[1] // self.parts
        start = self.place.rank // self.copies * width
        return rows[:, start : start + width]


def joined(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the processes of a model say of their parts of it, in the order of their ranks, as of one model.

    A refusal to serve at all stands for all of them.
    """
    for description in descriptions:
        if description["refusal"]:
            return dict(description)
    writing = [description for description in descriptions if description["writes"]]
    refusals: dict[str, str] = {}
    for description in writing:
        refusals = {**description["refusals"], **refusals}
    return {**writing[0], "hooks": [hook for d in writing for hook in d["hooks"]], "refusals": refusals}
