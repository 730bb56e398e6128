"""What the engine is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lenspool import entries
from lenspool_cache import Run
from lenspool_cache.ranges import OpenRange


@dataclass(frozen=True)
class CaptureGroup:
    """Hooks that want rows at the same positions."""

    hooks: tuple[str, ...]
    ranges: tuple[OpenRange, ...]


@dataclass(frozen=True)
class EngineRequest:
    """One job for the engine.

    Attributes
    ----------
    sampling
        None for a capture: the prompt is run and nothing more.
    run
        Under what the rows are stored.
    fresh
        Compute all of it, whatever vLLM's prefix cache has.
    """

    job_id: str
    tokens: list[int]
    captures: tuple[CaptureGroup, ...]
    interventions: list[dict[str, Any]]
    sampling: dict[str, Any] | None
    run: Run
    fresh: bool = False

    @property
    def length(self) -> int:
        """Positions that have rows when the run ends, at most."""
        return len(self.tokens) + (self.sampling["max_tokens"] - 1 if self.sampling else 0)


@dataclass(frozen=True)
class EngineResult:
    """What the engine did: generated tokens, their text, and the number of rows it stored."""

    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    computed_rows: int
    run_s: float


def wire(captures: Sequence[CaptureGroup]) -> list[Any]:
    """As the worker process reads it."""
    return [[list(group.hooks), [list(r) for r in group.ranges]] for group in captures]


def needs_tokens(captures: Sequence[CaptureGroup]) -> bool:
    """Whether a readout is about the tokens themselves; they would travel once more."""
    names = (name for group in captures for name in group.hooks if entries.is_readout(name))
    return any(entries.parse(name).op == "loss" for name in names)
