"""TransformerLens's `RemoteBridge`, with what of `TransformerBridge` a remote model can do too."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from transformer_lens.model_bridge import RemoteBridge, TransformerBridge

from lenspool.card import ModelCard
from lenspool.integrations.transformer_lens.driver import PoolDriver
from lenspool.integrations.transformer_lens.errors import BadInput
from lenspool.integrations.transformer_lens.norm import FinalNorm, Unembedding


class PoolBridge(RemoteBridge):
    """A model of a pool, as TransformerLens sees models.

    All of `RemoteBridge`, and: it can be called; text in batches, in ragged lists, with masks of its own making;
    `generate`; the tokenizer's methods, `W_U`, `b_U`, `ln_final` and `unembed` of `TransformerBridge`, so that the
    tools of `ActivationCache` give what they give there. Calls of several threads take turns.
    """

    to_tokens = TransformerBridge.to_tokens
    to_string = TransformerBridge.to_string
    to_str_tokens = TransformerBridge.to_str_tokens
    to_single_token = TransformerBridge.to_single_token
    to_single_str_token = TransformerBridge.to_single_str_token
    get_token_position = TransformerBridge.get_token_position
    tokens_to_residual_directions = TransformerBridge.tokens_to_residual_directions

    _driver: PoolDriver
    _hook_registry: dict[str, Any]

    def __init__(self, adapter: Any, tokenizer: Any, driver: PoolDriver) -> None:
        self._turn = threading.RLock()  # the hooks of a call are on the bridge while it runs
        super().__init__(adapter=adapter, tokenizer=tokenizer, driver=driver)
        self._hook_registry = {name: self._hook_registry[name] for name in driver.tree.served}  # in network order

    @property
    def card(self) -> ModelCard:
        """The served model's card."""
        return self._driver.card

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `forward`."""
        return self.forward(*args, **options)

    def forward(
        self,
        input: Any = None,
        *,
        return_type: str | None = "logits",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        **options: Any,
    ) -> Any:
        """Run prompts, and return logits, loss, both or nothing.

        Parameters
        ----------
        input
            Text, a list of texts, or token ids: `[pos]`, `[batch, pos]`, ragged lists. What had to be padded is masked.
        return_type
            `"logits"`, `"loss"`, `"both"`, or None, which moves no logits.
        options
            `loss_per_token`, `labels`, `attention_mask`, `intervene`, and those of `PoolDriver.forward`.

        Raises
        ------
        BadInput, Unsupported, LenspoolError
            See `PoolDriver.forward`.
        """
        if input is None:
            input = options.pop("input_ids", None)
        if input is not None:
            input, mask = self._padded(input, prepend_bos, padding_side)
            if mask is not None:
                if options.get("attention_mask") is not None:
                    raise BadInput("attention_mask", "together with input of several lengths, which has its own")
                options["attention_mask"] = mask
        if return_type is None:
            options.setdefault("return_logits", False)
        with self._turn:
            return super().forward(input, return_type=return_type, **options)

    def _padded(
        self, input: Any, prepend_bos: bool | None, padding_side: str | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids `[batch, pos]`, and the mask of what was padded."""
        if isinstance(input, str):
            return self.to_tokens(input, prepend_bos=prepend_bos), None
        if isinstance(input, (list, tuple)) and input and all(isinstance(text, str) for text in input):
            input = [self.to_tokens(text, prepend_bos=prepend_bos)[0].tolist() for text in input]
        if isinstance(input, (list, tuple)) and input and all(isinstance(row, (list, tuple)) for row in input):
            side = padding_side or getattr(self.tokenizer, "padding_side", "right")
            return _rectangle(input, getattr(self.tokenizer, "pad_token_id", None) or 0, str(side))
        tokens = torch.as_tensor(input)
        return (tokens.unsqueeze(0) if tokens.ndim == 1 else tokens), None

    def run_with_cache(
        self,
        input: Any,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        names_filter: Any = None,
        **options: Any,
    ) -> Any:
        """See `TransformerBridge.run_with_cache`; without a filter all but hooks that TransformerLens has switched off.

        Parameters
        ----------
        options
            Also those of `forward`.
        """
        if names_filter is None:
            off = {name for name, point in self.hook_dict.items() if self._gated_hook_reason(point.name or name)}

            def names_filter(name: str) -> bool:
                return name not in off

        with self._turn:
            return super().run_with_cache(input, return_cache_object, remove_batch_dim, names_filter, **options)

    def run_with_hooks(self, *args: Any, **options: Any) -> Any:
        """See `RemoteBridge.run_with_hooks`: functions see what was captured; `intervene` edits."""
        with self._turn:
            return super().run_with_hooks(*args, **options)

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Whether captures have `attn.hook_result`, which the pool then computes, for `stack_head_results`."""
        self.cfg._set_bridge_managed_hook_flag("use_attn_result", bool(use_attn_result))

    def __getattr__(self, name: str) -> Any:
        if name == "blocks":
            hint = "for per-head results call set_use_attn_result(True) before run_with_cache: the pool computes them"
            raise AttributeError(f"a pool's bridge has no blocks on this side; {hint}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def ln_final(self) -> FinalNorm:
        """The final norm, read from the checkpoint at its first use."""
        return self._driver.ending.norm

    @property
    def unembed(self) -> Unembedding:
        """The unembedding, read from the checkpoint at its first use."""
        return self._driver.ending.unembedding

    @property
    def W_U(self) -> torch.Tensor:  # noqa: N802  # TransformerLens's name
        """`[d_model, d_vocab]`."""
        return self.unembed.W_U

    @property
    def b_U(self) -> torch.Tensor:  # noqa: N802
        """`[d_vocab]`, zero where the model has none."""
        return self.unembed.b_U

    def generate(
        self,
        input: Any = "",
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = None,
        return_type: str | None = "input",
        verbose: bool = True,
        return_cache: bool = False,
        return_input_tokens: bool = False,
        names_filter: Any = None,
        stop_strings: str | list[str] | None = None,
        attention_mask: Any = None,
        intervene: Any = None,
        seed: int | None = None,
    ) -> Any:
        """Generate; the arguments are those of `TransformerBridge.generate`.

        Parameters
        ----------
        use_past_kv_cache, verbose
            Without effect.
        return_cache
            Also return the cache of the whole sequence, of one prompt only; with the same interventions.
        intervene
            As in `forward`; in the prompt and in what is generated.
        seed
            Makes sampling repeatable.

        Returns
        -------
        str, list or torch.Tensor
            Prompt and generated tokens: text for text, tokens `[batch, pos]` for tokens, or as `return_type` says
            (`"str"`, `"tokens"`). Rows that end earlier are filled up with the end-of-text token. With `return_cache`
            and `return_input_tokens` a tuple.
        """
        tokens, mask = self._padded(input, prepend_bos, "left")  # so that what is generated follows the prompts
        mask = attention_mask if mask is None else mask
        stops = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
        sampling = {
            "max_tokens": max_new_tokens,
            "temperature": temperature if do_sample else 0.0,
            "top_k": top_k or 0,
            "top_p": 1.0 if top_p is None else top_p,
            "seed": seed if do_sample else None,
            "frequency_penalty": freq_penalty if do_sample else 0.0,
            "repetition_penalty": repetition_penalty,
            "ignore_eos": not stop_at_eos,
            "stop_token_ids": stops if stop_at_eos else [],
            "stop": [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ()),
        }
        new = self._driver.generate(tokens, attention_mask=mask, intervene=intervene, **sampling)
        end = stops[0] if stops else getattr(self.tokenizer, "eos_token_id", None) or 0
        filled = torch.where(new < 0, torch.tensor(end), new)
        output = torch.cat([tokens, filled], dim=1)
        result = self._worded(output, input, return_type)
        extra: list[Any] = []
        if return_cache:
            if len(tokens) > 1 or mask is not None:
                raise BadInput("return_cache", "of several prompts", "one prompt without a mask")
            extra.append(
                self.run_with_cache(output, names_filter=names_filter, intervene=intervene, return_type=None)[1]
            )
        extra += [tokens] if return_input_tokens else []
        return (result, *extra) if extra else result

    def _worded(self, output: torch.Tensor, input: Any, return_type: str | None) -> Any:
        """Tokens in the form that was asked for."""
        texts = isinstance(input, str) or (isinstance(input, (list, tuple)) and all(isinstance(t, str) for t in input))
        if return_type not in ("input", "str", "tokens"):
            raise BadInput("return_type", f"got {return_type!r}", '"input", "str" or "tokens"')
        if return_type == "tokens" or (return_type == "input" and not texts):
            return output
        words = [self.tokenizer.decode(row, skip_special_tokens=True) for row in output]
        return words[0] if isinstance(input, str) or len(words) == 1 else words


def _rectangle(rows: Sequence[Sequence[int]], pad: int, side: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of several lengths as one tensor, and its mask; of one length without."""
    if not all(rows):
        raise BadInput("input_ids", "an empty prompt", "at least one token in each row")
    length = max(map(len, rows))
    left = [length - len(row) if side == "left" else 0 for row in rows]
    tokens = torch.full((len(rows), length), pad)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, left[i] : left[i] + len(row)] = torch.tensor([int(token) for token in row])
        mask[i, left[i] : left[i] + len(row)] = 1
    return tokens, None if mask.all() else mask
