"""The provider: inspect's calls, as calls of a pool."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    ModelAPI,
    ModelCall,
    ModelOutput,
    RetryDecision,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from lenspool import hooks as hk
from lenspool.card import ModelCard
from lenspool.client import Client
from lenspool.errors import InvalidJob, LenspoolError, QueueFull, UnsupportedHook
from lenspool.integrations import wire
from lenspool.integrations.inspect import outputs, references
from lenspool.integrations.inspect.asking import Asked, asked, names
from lenspool.integrations.inspect.clients import Clients
from lenspool.integrations.inspect.messages import prompt_ids
from lenspool.integrations.inspect.run import Run
from lenspool.integrations.inspect.settings import MAX_TOKENS, sampling_of, wanted_tokens, warn
from lenspool.sampling import sampling_document
from lenspool.terms import Priority, check_priority
from lenspool.tokenizer import Tokenizer


class LenspoolAPI(ModelAPI):
    """`get_model("lenspool/<model>")`: a model of a pool.

    Parameters
    ----------
    model_name
        Name or id of a served model.
    base_url
        Redis; default as of `lenspool.Client`.
    capture
        Hooks to capture in every generation; any spelling, globs too.
    positions
        Which of its positions: `"prompt"`, `"generated"`, `"all"`, `"last"`, ints.
    inline
        Put the rows themselves into the output's metadata, in TransformerLens's form, in place of references.
    interventions
        Edits of every run, in wire form (`lenspool.integrations.wire`).
    store, priority, patience
        As of `lenspool.Client` and its calls.

    Raises
    ------
    InvalidJob
        A model argument is unknown or wrong; hooks and edits are checked here, against the model's card.
    """

    provides_sequence_logits = True
    supports_attention_mask = False

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - inspect's signature
        *,
        capture: str | Sequence[str] | None = None,
        positions: Any = "prompt",
        inline: bool = False,
        interventions: Mapping[str, Any] | None = None,
        store: str | Path | Literal[False] | None = None,
        priority: Priority = "batch",
        patience: float | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        if unknown:
            allowed = "capture, positions, inline, interventions, store, priority, patience"
            raise InvalidJob(sorted(unknown)[0], "is no model argument of lenspool", allowed)
        check_priority(priority)
        self._store, self._priority, self._patience = store, priority, patience
        self._capture = names(capture, "capture")
        self._positions, self._inline = positions, bool(inline)
        self._edits = wire.interventions(_as_logged(interventions))
        self._clients = Clients(self._make)
        self._shared: dict[str, Any] | None = None
        if self._capture:
            captured = hk.resolve(self._capture, self._card, "capture")
            if self._inline:
                outputs.check_inline(captured, self._keys)
        for edit in self._edits:
            hk.resolve(edit.hook, self._card, "interventions")

    def _make(self) -> Client:
        return Client(self.base_url, model=self.model_name or None, store=self._store, patience=self._patience)

    @cached_property
    def _card(self) -> ModelCard:
        return self._clients.card()

    @cached_property
    def _keys(self) -> dict[str, str]:
        return wire.wire_keys(self._card)

    # -- what TransformerLens asks its providers

    def supported_kinds(self) -> frozenset[str]:
        """Kinds of wire keys that the model serves."""
        return wire.served_kinds(self._keys)

    def capability_note(self) -> str:
        """Why the other kinds are not served; empty when all are."""
        gated = [kind for kind in wire.KINDS if kind not in self.supported_kinds()]
        reasons = []
        for kind in gated:
            try:
                hk.resolve(wire.hook_of(f"0:{kind}", "capture"), self._card)
            except InvalidJob as error:
                reasons.append(error.reason)
        return "; ".join(reasons)

    # -- what inspect asks

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        """See `inspect_ai.model.ModelAPI.generate`.

        Raises
        ------
        LenspoolError
            See `lenspool.errors`; inspect repeats those of them that are `retryable`.
        """
        began = time.monotonic()
        ask = asked(config.extra_body)
        run = await self._run(ask, input, tools)
        call: ModelCall | None = None
        if ask.forward is not None:
            output = await self._forward(run, ask.forward)
        elif (room := run.card.max_model_len - len(run.tokens)) < 1:
            said = (
                f"The prompt has {len(run.tokens)} tokens; {run.card.name} takes at most {run.card.max_model_len - 1}."
            )
            output = ModelOutput.from_content(self.model_name, said, stop_reason="model_length", error=said)
        else:
            if tools and tool_choice == "any":
                warn("tool_choice='any'")
            sampling = sampling_of(config, ask.extras, room)
            call = run.call(sampling)
            output = await self._generate(run, ask, tools, config, sampling)
            call.set_response({"choices": [choice.stop_reason for choice in output.choices]})
        output.time = time.monotonic() - began
        return output if call is None else (output, call)

    async def _run(self, ask: Asked, messages: Sequence[ChatMessage], tools: Sequence[ToolInfo]) -> Run:
        """What a call is about: its tokens, edits and captures."""
        client, card, tokenizer = await self._session()
        ids = None if ask.forward is None else ask.forward.get("input_ids")
        tokens = list(ids) if ids is not None else prompt_ids(tokenizer, messages, tools)
        edits = [*self._edits, *(edit for specs in ask.interventions for edit in wire.interventions(specs))]
        return Run(client, card, tokenizer, tokens, edits, [*self._capture, *ask.capture])

    async def _session(self) -> tuple[Client, ModelCard, Tokenizer]:
        client = await self._clients.get()
        card, desk = await client._connect()
        self.__dict__.setdefault("_card", card)
        if desk.tokenizer is None:
            raise InvalidJob("model", f"{card.name} was served without a tokenizer", "a model with one")
        return client, card, desk.tokenizer

    async def _generate(
        self, run: Run, ask: Asked, tools: Sequence[ToolInfo], config: GenerateConfig, sampling: dict[str, Any]
    ) -> ModelOutput:
        """Generate text, with what is captured meanwhile."""
        count = config.num_choices or 1
        where = self._positions if ask.positions is None else ask.positions
        inline = self._inline if ask.inline is None else ask.inline
        what: dict[str, Any] = {"interventions": run.edits, "positions": where if run.hooks else "all"}
        desk, request = await run.client._request(run.tokens, run.hooks, what, sampling_document(**sampling))
        if inline and request.hooks:
            outputs.check_inline(request.hooks, self._keys)
            if count > 1:
                raise InvalidJob("num_choices", f"got {count} with activations inline", "1; or by reference")
        generations = await run.generate(count, {"hooks": run.hooks, **what, **sampling, "priority": self._priority})
        first = generations[0]
        told = {name: first.provenance[name] for name in ("worker", "queue_s", "run_s")}
        metadata: dict[str, Any] = {
            references.KEY: {"model": run.card.id, "seed": sampling.get("seed"), "cached": first.cached, **told}
        }
        if request.hooks and inline:
            metadata["activations"] = await asyncio.to_thread(outputs.inline, first, self._keys)
        elif request.hooks:
            self._shared = self._shared or await references.put_card(desk, run.card)
            samples = [request.resampled(sampling["seed"] + i) if count > 1 else request for i in range(count)]
            metadata[references.KEY]["captures"] = [references.reference(self._shared, sample) for sample in samples]
        full = sampling["max_tokens"] < wanted_tokens(config)
        choices = [
            outputs.choice_of(generation, run.tokenizer, tools, self.model_name, config, full=full)
            for generation in generations
        ]
        usage = outputs.usage_of(generations)
        return ModelOutput(model=self.model_name, choices=choices, usage=usage, metadata=metadata)

    async def _forward(self, run: Run, request: Mapping[str, Any]) -> ModelOutput:
        """TransformerLens's forward run: rows of the prompt and logits inline, and the next token."""
        mask = request.get("attention_mask")
        if mask is not None and not all(mask):
            raise InvalidJob("attention_mask", "lenspool pads nothing", "the tokens that count, without a mask")
        hooks = {key: self._hook_of(key, f"capture[{i}]") for i, key in enumerate(request.get("capture") or ())}
        logits = request.get("return_logits", True)
        result = await run.client.generate(
            run.tokens,
            hooks=[*hooks.values(), *([outputs.LOGITS] if logits else [])],
            positions="prompt",
            interventions=run.edits,
            priority=self._priority,
            max_tokens=1,
            temperature=0.0,
        )
        metadata = await asyncio.to_thread(outputs.forward, result, hooks, logits)
        choice = outputs.choice_of(result, run.tokenizer, (), self.model_name, GenerateConfig(), full=False)
        usage = outputs.usage_of([result])
        return ModelOutput(model=self.model_name, choices=[choice], usage=usage, metadata=metadata)

    def _hook_of(self, key: Any, field: str) -> str:
        """The hook of a wire key that the model serves."""
        if key in self._keys:
            return self._keys[key]
        try:
            return hk.resolve(wire.hook_of(key, field), self._card, field)[0]
        except UnsupportedHook as error:
            served = ", ".join(kind for kind in wire.KINDS if kind in self.supported_kinds())
            raise wire.InvalidWire(field, f"{key!r} cannot be served: {error.reason}", f"kinds {served}") from None

    def should_retry(self, ex: BaseException) -> RetryDecision:
        """A full queue slows inspect down; a broker, worker or time that was lost is tried again; all else is final."""
        if isinstance(ex, QueueFull):
            return RetryDecision.rate_limit()
        if isinstance(ex, LenspoolError) and ex.retryable:
            return RetryDecision.transient()
        return RetryDecision.no()

    def max_tokens(self) -> int | None:
        """Tokens of a generation where nothing is said; the model's context may end it before."""
        return MAX_TOKENS

    def max_connections(self) -> int:
        """Calls in flight, where inspect does not adapt their number: the engine batches as many as it can."""
        return 64

    def connection_key(self) -> str:
        """One limit for each model of a pool."""
        return f"{self.base_url} {self.model_name}"

    def collapse_user_messages(self) -> bool:
        """Many chat templates want the roles to take turns."""
        return True

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, by the model's tokenizer."""
        return (await self._session())[2].encode(text)

    async def count_text_tokens(self, text: str) -> int:
        """Number of tokens of a text, without special ones."""
        return len((await self._session())[2].encode(text, special=False))

    async def aclose(self) -> None:
        """Close this event loop's connection; a later call opens another."""
        await self._clients.aclose()


def _as_logged(interventions: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Refuse edits that are no JSON: inspect tells models apart, and logs them, by the JSON of their arguments."""
    try:
        json.dumps(interventions)
    except (TypeError, ValueError) as error:
        allowed = "lists, lenspool.integrations.wire.encode_array(vector), or array_ref(await client.put(vector))"
        raise InvalidJob("interventions", f"a model argument must be JSON: {error}", allowed) from None
    return interventions or {}
