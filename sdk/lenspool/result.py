"""What a call returns: arrays by hook name, opened when they are looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lenspool import hooks as hk
from lenspool.card import ModelCard
from lenspool.errors import InvalidJob
from lenspool_cache.codec import dtype_of

if TYPE_CHECKING:
    import torch

Reader = Callable[[str], np.ndarray]
"""Hook name -> rows `[rows, width]` in position order."""


class Capture(Mapping[str, np.ndarray]):
    """Activations of one prompt: a mapping from hook name to array.

    An array is read from the store, and its checksum verified, at the first access, and kept. Names may be given in
    any spelling that a request accepts (`"resid_post.3"`).

    Attributes
    ----------
    token_ids
        The tokens that ran, as ids.
    tokens
        The tokens as text (of a generation: prompt and generated ones); None when the model has no tokenizer.
    positions
        `[rows]` absolute position of each row, ascending, the same for every hook.
    cached
        True when nothing of the answer was computed for this call.
    provenance
        Model, engine and versions, dtype, rows computed and reused, seconds in queue and engine, worker, and the
        content key of each hook. Numbers of a batched engine agree with those of a solo run to float rounding, not to
        the bit (float32: about 1e-6 relative); a stored answer is returned bit for bit.
    """

    def __init__(
        self,
        card: ModelCard,
        *,
        hooks: list[str],
        positions: np.ndarray,
        token_ids: list[int],
        tokens: list[str] | None,
        reader: Reader,
        cached: bool,
        provenance: dict[str, Any],
    ) -> None:
        self._card = card
        self._reader = reader
        self._arrays: dict[str, np.ndarray] = {}
        self.hooks = hooks
        self.positions = positions
        self.token_ids = token_ids
        self.tokens = tokens
        self.cached = cached
        self.provenance = provenance

    def _name(self, name: str) -> str:
        if name in self.hooks:
            return name
        for resolved in hk.resolve(name, self._card):
            if resolved in self.hooks:
                return resolved
        raise KeyError(f"{name} was not captured; this result has {', '.join(self.hooks) or 'no hooks'}")

    def __getitem__(self, name: str) -> np.ndarray:
        """Rows of one hook in the model's dtype (bfloat16 as `ml_dtypes.bfloat16`), read-only.

        The shape is the hook's (`HookInfo.shape`), with the rows in place of `pos`: `[rows, d_model]`,
        `[rows, head, d_head]`, `[head, rows, k_pos]`.

        Raises
        ------
        KeyError
            The hook was not asked for.
        CacheCorrupt
            The stored rows do not match their checksum; the same call again computes them anew.
        """
        name = self._name(name)
        if name not in self._arrays:
            rows = self._reader(name) if len(self.positions) else self._empty(name)
            array = self._card.hooks[name].arrange(rows)
            array.flags.writeable = False
            self._arrays[name] = array
        return self._arrays[name]

    def _empty(self, name: str) -> np.ndarray:
        """The rows of a selection without rows: the generated positions of a generation of one token."""
        info = self._card.hooks[name]
        return np.empty((0, info.width), dtype_of(info.dtype or self._card.dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self.hooks)

    def __len__(self) -> int:
        return len(self.hooks)

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and bool(self._name(name))
        except (KeyError, ValueError, InvalidJob):
            return False

    def torch(self, name: str) -> torch.Tensor:
        """Rows of one hook as a torch tensor of the model's dtype (a copy)."""
        import torch

        array = self[name]
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
        return torch.from_numpy(array.copy())

    def __repr__(self) -> str:
        source = "cached" if self.cached else "computed"
        return f"<{type(self).__name__} {len(self.hooks)} hooks x {len(self.positions)} positions, {source}>"


class Generation(Capture):
    """A generation, with the activations that were asked for.

    The row of position p is the one from which token p+1 is predicted; the last generated token has not been fed back,
    so it has no row.

    Attributes
    ----------
    text
        The generated text; None when the model has no tokenizer. Stop strings are not part of it.
    token_ids
        The generated token ids.
    prompt_token_ids
        The prompt's token ids.
    finish_reason
        `"stop"` (end of text or a stop string) or `"length"`.
    """

    def __init__(self, card: ModelCard, *, generation: Mapping[str, Any], prompt: list[int], **rest: Any) -> None:
        super().__init__(card, token_ids=list(generation["token_ids"]), **rest)
        self.prompt_token_ids = prompt
        self.text: str | None = generation["text"]
        self.finish_reason: str = generation["finish_reason"]

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.text!r}>"
