"""What one call runs, and how inspect hears of its text meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inspect_ai.model import ModelCall, StreamTextEvent
from inspect_ai.model._stream import (
    model_stream_requested,
    report_model_stream_delta,
    report_model_stream_progress,
    report_model_stream_restart,
    report_model_stream_start,
)

from lenspool.card import ModelCard
from lenspool.client import Client
from lenspool.generation import Generation
from lenspool.interventions import Intervention
from lenspool.tokenizer import Tokenizer


@dataclass(frozen=True)
class Run:
    """What one call runs."""

    client: Client
    card: ModelCard
    tokenizer: Tokenizer
    tokens: list[int]
    edits: list[Intervention]
    hooks: list[str]

    def call(self, sampling: Mapping[str, Any]) -> ModelCall:
        """The same for inspect's log of calls; edits without their vectors."""
        request = {"model": self.card.id, "prompt": self.tokenizer.text(self.tokens), "sampling": dict(sampling)}
        more = {"capture": self.hooks, "interventions": [repr(edit) for edit in self.edits]}
        return ModelCall.create(request | more, None)

    async def generate(self, count: int, options: Mapping[str, Any]) -> list[Generation]:
        """Generate; one choice as a stream, where inspect wants to hear of it."""
        if count == 1 and model_stream_requested():
            return [await _streamed(self.client, self.tokens, options)]
        made = await self.client.generate(self.tokens, n=count, **options)
        return made if isinstance(made, list) else [made]


async def _streamed(client: Client, tokens: list[int], options: Mapping[str, Any]) -> Generation:
    """Generate, and tell inspect of each piece."""
    async with client.stream(tokens, **options) as stream:
        begun = False
        async for delta in stream:
            if not begun:
                report_model_stream_start()
                begun = True
            report_model_stream_progress(len(stream.token_ids))
            if delta.text and model_stream_requested():
                await report_model_stream_delta(StreamTextEvent(text=delta.text))
    if not stream.exact:  # the job was lost and run again, with another end
        await report_model_stream_restart()
        await report_model_stream_delta(StreamTextEvent(text=stream.result.text or ""))
    return stream.result
