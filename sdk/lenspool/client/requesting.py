"""What every call begins with: options of the client and of the call, and a checked request."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

from lenspool import spans
from lenspool.answer import Desk
from lenspool.arguments import Hooks, Manner, Options, Prompt, check_names, manner
from lenspool.connection import Connection
from lenspool.errors import InvalidJob
from lenspool.generation import Generation
from lenspool.job import Request, check_reuse, prepare, tokenize
from lenspool.places import Tokens, located
from lenspool.result import Capture
from lenspool.retrying import persistent
from lenspool.staged import resolved
from lenspool.streaming import Tell

if TYPE_CHECKING:
    from lenspool.client.many import Many

ResultT = TypeVar("ResultT", Capture, Generation)


class Requesting(Connection):
    """A connection that makes requests, and has them answered."""

    def with_options(self, **options: Unpack[Options]) -> Self:
        """A view of this client whose calls have other defaults; it shares everything else with it.

        Parameters
        ----------
        options
            `priority`, `timeout`, `queue_timeout`, `run_timeout`, `retries`, `reuse`; see `lenspool.client.Options`. A
            call's own arguments come before them.

        Examples
        --------
        >>> patient = client.with_options(priority="batch", retries=5)  # doctest: +SKIP

        Raises
        ------
        InvalidJob
            An option has a value that it may not have.
        """
        check_names("with_options", options, Options)
        view = copy.copy(self)
        view._options = {**self._options, **options}
        manner(view._options)
        return view

    async def tokens(self, prompt: Prompt) -> Tokens:
        """The tokens of a prompt, as it would run: ids, text and positions, shown as a table.

        Raises
        ------
        InvalidJob
            It is no prompt of this model.
        """
        card, desk = await self._connect()
        ids = tokenize(card, desk.tokenizer, prompt)
        return Tokens(ids, desk.tokenizer.tokens(ids) if desk.tokenizer else None, desk.tokenizer)

    def _manner(self, options: Mapping[str, Any]) -> Manner:
        """How a call waits: as its own options say, else the client's."""
        return manner({**self._options, **options})

    async def _request(
        self,
        prompt: Prompt,
        hooks: Hooks,
        options: Mapping[str, Any],
        sampling: dict[str, Any] | None = None,
    ) -> tuple[Desk, Request]:
        """Check a call's arguments, and ask the pool for what they stand for."""
        card, desk = await self._connect()
        for field, others in (("stop", "no stop strings"), ("json_schema", "no schema")):
            if sampling is not None and sampling.get(field) and desk.tokenizer is None:
                raise InvalidJob(field, f"{card.name} was served without a tokenizer", others)
        tokens = tokenize(card, desk.tokenizer, prompt)
        positions, items = located(
            options.get("positions", "all"), options.get("interventions", ()), tokens, desk.tokenizer
        )
        reuse = check_reuse({**self._options, **options}.get("reuse", "prefix"))
        items, norms = await resolved(cast("Many", self), tokens, items, reuse)  # which a client is
        return desk, prepare(card, desk.tokenizer, tokens, hooks, positions, items, sampling, norms, reuse)

    async def _answered(
        self, desk: Desk, request: Request, kind: type[ResultT], how: Manner, *, tell: Tell | None = None
    ) -> ResultT:
        """The result of a request, from the store or the pool."""
        with spans.asking(request) as span:
            terms = dataclasses.replace(how.terms, trace=spans.traceparent())

            async def answer(timeout: float | None) -> ResultT:
                return await desk.answer(request, kind, timeout, terms, tell=tell)

            result = await persistent(answer, how.timeout, how.retries)
            spans.answered(span, result.cached, result.provenance)
            return result
