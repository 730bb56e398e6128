"""TransformerLens's driver protocol over a pool: one call is one job per prompt, all at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformer_lens.model_bridge.driver_protocol import ForwardResult

from lenspool.card import ModelCard
from lenspool.client import Client
from lenspool.integrations.transformer_lens.errors import BadInput, Unsupported
from lenspool.integrations.transformer_lens.pool import Pool
from lenspool.integrations.transformer_lens.rows import Row, joined, rows_of
from lenspool.integrations.transformer_lens.specs import Specs
from lenspool.integrations.transformer_lens.tree import Tree
from lenspool.integrations.transformer_lens.weights import Ending
from lenspool.many import in_flight
from lenspool.result import Capture

LOGITS = "unembed.hook_out"
_PROBE = 8
_FIT = 0.99
_TERMS = ("priority", "timeout", "queue_timeout", "run_timeout")
_UNUSED = ("output_attentions", "use_cache", "return_dict")
"""What TransformerLens hands to every driver, and torch models alone have a use for."""


class PoolDriver:
    """Forward passes of a `RemoteBridge`; see `transformer_lens.model_bridge.driver_protocol.Driver`.

    Attributes
    ----------
    card
        The served model's.
    """

    _supported_features = frozenset({"weight_access"})
    supports_attention_mask = True

    def __init__(self, pool: Pool, card: ModelCard, tree: Tree, ending: Ending, cfg: Any, tokenizer: Any) -> None:
        self.pool = pool
        self.card = card
        self.tree = tree
        self._ending = ending
        self._ending_lock = threading.Lock()
        self._ending_fits = False
        self.bridge_config = cfg
        self.tokenizer = tokenizer
        self.architecture: str = cfg.architecture
        self.supported_hook_points = frozenset(tree.served)
        self.non_fireable_hook_points = tree.absent
        self.provides_sequence_logits = LOGITS in card.hooks
        self._specs = Specs(tree, lambda: self.ending.norm)

    def forward(
        self,
        input_ids: Any = None,
        *,
        capture: Sequence[str] = (),
        intervene: Any = None,
        max_new_tokens: int = 1,
        return_logits: bool = True,
        attention_mask: Any = None,
        **options: Any,
    ) -> ForwardResult:
        """Run prompts.

        Parameters
        ----------
        input_ids
            `[pos]`, `[batch, pos]`, or ragged lists.
        capture
            Hook points; exactly these are returned, and nothing else is moved.
        intervene
            See `lenspool.integrations.transformer_lens.specs.Specs.read`.
        max_new_tokens
            1 runs the prompt. More generates so many tokens greedily, to the end of text; captures and logits then
            have rows for all tokens but the last, and `new_tokens` are those, padded with -1.
        return_logits
            Whether logits of all positions come back.
        attention_mask
            1 for tokens, 0 for padding at both ends. Captures and logits of padding are 0 and -inf.
        options
            `priority`, `timeout`, `queue_timeout`, `run_timeout`, as of `lenspool.Client.capture`.

        Returns
        -------
        ForwardResult
            Tensors `[batch, ...]`, padded on the right; `raw_output` is the list of the pool's results.

        Raises
        ------
        BadInput, Unsupported
            An argument is wrong; nothing was queued.
        LenspoolError
            See `lenspool.errors`.
        """
        if input_ids is None:
            raise BadInput("input_ids", "a pool runs token ids, and got none")
        if unknown := set(options) - {*_TERMS, *_UNUSED}:
            raise TypeError(f"a pool has no argument {sorted(unknown)}; it has {', '.join(_TERMS)}")
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise BadInput("max_new_tokens", f"got {max_new_tokens!r}", "1 or more")
        if return_logits and not self.provides_sequence_logits:
            raise Unsupported("return_logits", f"{self.card.name} is served without logits", "return_logits=False")
        rows = rows_of(input_ids, attention_mask)
        edits = self._specs.read(intervene, rows)
        hooks = {name: self.tree.served[name] for name in capture}
        wanted = list(dict.fromkeys([*hooks.values(), *([LOGITS] if return_logits else [])]))
        if not wanted and max_new_tokens == 1:
            return ForwardResult(raw_output=[])
        terms = {name: options[name] for name in _TERMS if name in options}

        async def one(client: Client, i: int) -> Capture:
            edited = {"interventions": edits[i], **terms}
            if max_new_tokens == 1:
                return await client.capture(rows[i].tokens, wanted, **edited)
            return await client.generate(rows[i].tokens, max_tokens=max_new_tokens, hooks=wanted, **edited)

        results = self._each(one, len(rows))
        arrays = {name: [result.torch(name) for result in results] for name in wanted}
        shapes = {hook: self.card.hooks[hook].shape for hook in wanted}
        return ForwardResult(
            logits=self._logits(arrays[LOGITS], rows) if return_logits else None,
            captured={name: joined(arrays[hook], rows, shapes[hook], 0.0) for name, hook in hooks.items()},
            new_tokens=_new_tokens(results) if max_new_tokens > 1 else None,
            raw_output=results,
        )

    def generate(
        self, input_ids: Any, *, attention_mask: Any = None, intervene: Any = None, **sampling: Any
    ) -> torch.Tensor:
        """Generated tokens `[batch, tokens]`, padded with -1.

        Parameters
        ----------
        sampling
            Those of `lenspool.sampling.Sampling`; of a seed each row has the next.
        """
        rows = rows_of(input_ids, attention_mask)
        edits = self._specs.read(intervene, rows)
        seed = sampling.pop("seed", None)

        async def one(client: Client, i: int) -> Capture:
            own = None if seed is None else seed + i
            return await client.generate(rows[i].tokens, interventions=edits[i], seed=own, **sampling)

        return _new_tokens(self._each(one, len(rows)))

    def _each(self, one: Callable[[Client, int], Awaitable[Capture]], count: int) -> list[Capture]:
        """Results of all rows, which run at once; when one fails the others are given up."""

        async def call(client: Client) -> list[Capture]:
            async with contextlib.aclosing(in_flight(range(count), partial(one, client), concurrency=count)) as pairs:
                return [result async for _, result in pairs]

        return self.pool.run(call)

    def _logits(self, arrays: Sequence[torch.Tensor], rows: Sequence[Row]) -> torch.Tensor:
        """Logits in TransformerLens's vocabulary, which may be longer than the engine's."""
        logits = joined(arrays, rows, self.card.hooks[LOGITS].shape, float("-inf"))
        missing = int(self.bridge_config.d_vocab) - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits

    @property
    def ending(self) -> Ending:
        """Final norm and unembedding, from the client's checkpoint; at first use held against the served model's.

        Raises
        ------
        ValueError
            The checkpoint is not the served model's.
        """
        with self._ending_lock:
            if not self._ending_fits:
                self._check_ending()
                self._ending_fits = True
        return self._ending

    def _check_ending(self) -> None:
        """Compute the logits of one prompt's last position here, and compare.

        By their correlation: scale and soft-cap of logits, and rounding, leave it near 1.
        """
        hooks = ["resid_post.-1", LOGITS]
        tokens = [1 + 7 * i % (self.card.vocab_size - 1) for i in range(_PROBE)]
        served = self.pool.run(lambda client: client.capture(tokens, hooks, positions="last"))
        stream, logits = (served.torch(hook)[0].float() for hook in hooks)
        with torch.no_grad():
            ours = self._ending.unembedding(self._ending.norm(stream.to(self._ending.dtype))).float()
        fit = torch.corrcoef(torch.stack([ours[: len(logits)], logits[: len(ours)]]))[0, 1].item()
        if not fit > _FIT:
            raise ValueError(
                f"the final norm and unembedding of {self._ending.source} are not those of {self.card.name}: logits "
                f"computed with them correlate with the served ones by {fit:.3f}"
            )

    def get_param(self, name: str) -> torch.Tensor | None:
        """A weight by its name in the checkpoint; None when there is none of the name, and after `close`."""
        return None if self.pool.closed else self._ending.parameter(name)

    def supports(self, feature: str) -> bool:
        """Whether there is one of `driver_protocol.KNOWN_FEATURES`."""
        return feature in self._supported_features

    def close(self) -> None:
        """Disconnect, and stop a pool that was started for this driver; again: nothing. Other pools go on."""
        self.pool.close()


def _new_tokens(results: Sequence[Capture]) -> torch.Tensor:
    tokens = [torch.tensor(result.token_ids) for result in results]
    return torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-1)
