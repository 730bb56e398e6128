"""What a call returns: arrays by hook name, opened when they are looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from lenspool import comparison, entries, labelled, shown
from lenspool import hooks as hk
from lenspool.card import HookInfo, ModelCard
from lenspool.comparison import Comparison
from lenspool.errors import InvalidJob
from lenspool.plots import Plots
from lenspool.readouts import RESULTS, Readout, from_text
from lenspool_cache.codec import dtype_of

if TYPE_CHECKING:
    import torch

Reader = Callable[[str], np.ndarray]
"""Hook name -> rows `[rows, width]` in position order."""

Strings = Callable[[Sequence[int]], list[str]]
"""Token ids -> each as text by itself."""


class Capture(Mapping[str, Any]):
    """Activations of one prompt: a mapping from hook name to array, and from readouts to what they give.

    An array is read from the store, and its checksum verified, at the first access, and kept. Names may be given in
    any spelling that a request accepts (`"resid_post.3"`).

    Attributes
    ----------
    card
        The model.
    token_ids
        The tokens that ran, as ids.
    prompt_token_ids
        The prompt's; of a capture the same.
    tokens
        The tokens as text (of a generation: prompt and generated ones); None when the model has no tokenizer.
    hooks
        Hooks and readouts by their canonical names.
    positions
        `[rows]` absolute position of each row, ascending, the same for every hook and readout, but for `loss`, which
        leaves out the prompt's last position, and reductions, which have no positions.
    cached
        True when nothing of the answer was computed for this call.
    provenance
        Model, engine and versions, dtype, rows computed and reused, seconds in queue and engine, worker, and the
        content key of each hook. Numbers of a batched engine agree with those of a solo run to float rounding, not to
        the bit (float32: about 1e-6 relative); a stored answer is returned bit for bit. `prefix_rows` is how
        many rows belong to other runs which begin like this one, `prefix_keys` in which entries those stand; None where
        the client does not reach the store.
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
        strings: Strings | None = None,
    ) -> None:
        self.card = card
        self._reader = reader
        self._strings = strings
        self._values: dict[str, Any] = {}
        self.hooks = list(dict.fromkeys(entries.parse(n).whole.name if entries.is_readout(n) else n for n in hooks))
        self.positions = positions
        self.token_ids = token_ids
        self.prompt_token_ids = token_ids
        self.tokens = tokens
        self.cached = cached
        self.provenance = provenance

    @property
    def sequence(self) -> list[int]:
        """Token ids at all positions: those that `tokens` tells as text."""
        return self.token_ids

    def canonical(self, name: str | Readout) -> str:
        """The canonical name of a hook or readout that was captured.

        Raises
        ------
        KeyError
            It was not, or it is a pattern that several match.
        """
        if isinstance(name, str) and name in self.hooks:
            return name
        found = []
        try:
            readout = name if isinstance(name, Readout) else from_text(name) if entries.is_readout(name) else None
            names = hk.resolve(readout.hook if readout else name, self.card)  # type: ignore[arg-type]
        except InvalidJob as error:
            raise KeyError(f"{name}: {error.reason}; this result has {', '.join(self.hooks) or 'no hooks'}") from None
        for resolved in names:
            if readout is None:
                found += [resolved] if resolved in self.hooks else []
                continue
            for entry in (entries.parse(n) for n in self.hooks if n.startswith(f"{resolved}|")):
                found += [entry.name] if readout.matches(entry) else []
        if len(found) > 1:
            raise KeyError(f"{name} is several of this result's: {', '.join(found)}")
        if found:
            return found[0]
        raise KeyError(f"{name} was not captured; this result has {', '.join(self.hooks) or 'no hooks'}")

    def __getitem__(self, name: str | Readout) -> Any:
        """Rows of one hook in the model's dtype (bfloat16 as `ml_dtypes.bfloat16`), read-only; or a readout.

        The shape is the hook's (`HookInfo.shape`), with the rows in place of `pos`: `[rows, d_model]`,
        `[rows, head, d_head]`, `[head, rows, k_pos]`. A readout gives an array, `TopK` or `Features`
        (`lenspool.readouts`); one of several hooks is asked for hook by hook.

        Raises
        ------
        KeyError
            The hook was not asked for.
        CacheMiss, CacheCorrupt
            The stored rows were evicted since, or do not match their checksum; the same call again computes them anew.
        """
        name = self.canonical(name)
        if name not in self._values:
            self._values[name] = self._open(name)
        return self._values[name]

    def _open(self, name: str) -> Any:
        if not entries.is_readout(name):
            return self._array(name, self.card.hooks[name], empty=len(self.positions) == 0)
        entry = entries.parse(name)
        empty = len(self.positions) == 0 and not entry.reduces
        arrays = {e.part: self._array(e.name, entries.info(e, self.card), empty=empty) for e in entry.stored}
        if entry.reduces:
            return arrays[""][0]
        if entry.op in RESULTS:
            return RESULTS[entry.op](**arrays)
        return arrays[""]

    def _array(self, name: str, info: HookInfo, *, empty: bool) -> np.ndarray:
        """Rows in their shape; none for a selection without rows: the generated positions of one token."""
        rows = np.empty((0, info.width), dtype_of(info.dtype or self.card.dtype)) if empty else self._reader(name)
        array = rows[:, 0] if info.shape == ("pos",) else info.arrange(rows)
        array.flags.writeable = False
        return array

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything as arrays by name, for files: a readout of several arrays as `<readout>.indices`, ..."""
        out: dict[str, np.ndarray] = {}
        for name in self.hooks:
            value = self[name]
            parts = {"": value} if isinstance(value, np.ndarray) else vars(value)
            out |= {f"{name}.{part}" if part else name: array for part, array in parts.items()}
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self.hooks)

    def __len__(self) -> int:
        return len(self.hooks)

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, (str, Readout)) and bool(self.canonical(name))
        except KeyError:
            return False

    __eq__, __hash__ = object.__eq__, object.__hash__  # a mapping's would compare arrays, which have no one answer

    @overload
    def numpy(self, name: str | Readout) -> np.ndarray: ...

    @overload
    def numpy(self) -> dict[str, np.ndarray]: ...

    def numpy(self, name: str | Readout | None = None) -> np.ndarray | dict[str, np.ndarray]:
        """Rows of one hook, or a readout that is one array, in a dtype of numpy's own; without a name: `arrays`, so.

        bfloat16 becomes float32, exactly, in a copy; all else is the array itself, which is read-only.
        """
        if name is not None:
            return _plain(self._one(name))
        return {name: _plain(array) for name, array in self.arrays().items()}

    @overload
    def torch(self, name: str | Readout) -> torch.Tensor: ...

    @overload
    def torch(self) -> dict[str, torch.Tensor]: ...

    def torch(self, name: str | Readout | None = None) -> torch.Tensor | dict[str, torch.Tensor]:
        """Rows of one hook, or a readout that is one array, as a torch tensor of the same dtype (a copy).

        Without a name: `arrays`, so.
        """
        if name is not None:
            return tensor(self._one(name))
        return {name: tensor(array) for name, array in self.arrays().items()}

    def _one(self, name: str | Readout) -> np.ndarray:
        value = self[name]
        if not isinstance(value, np.ndarray):
            raise InvalidJob("name", f"{name} is several arrays", f"result[name].{', .'.join(vars(value))}")
        return value

    def to_xarray(self, name: str | Readout | None = None) -> Any:
        """Labelled: one hook or readout as `xarray.DataArray`, or without a name everything as `xarray.Dataset`.

        Dimensions are `token`, `head`, `d_model`, ...; the rows have the coordinates `position` (an index:
        `.sel(position=3)`), `token_id` and `text`. bfloat16 becomes float32. In a dataset the rows of a loss are as
        many as the others, and NaN where there is none; a dimension that has several sizes has each size in its name.

        Raises
        ------
        ImportError
            xarray is not installed.
        """
        return labelled.dataset(self) if name is None else labelled.data_array(self, name)

    @property
    def plot(self) -> Plots:
        """Pictures: `plot.norms()`, `plot.logit_lens()`, `plot.attention(layer, head)`."""
        return Plots(self, self._strings)

    def highlight(self, by: str | Readout | Any | None = None) -> shown.Highlight:
        """The tokens coloured by a number each, for a notebook.

        Parameters
        ----------
        by
            A hook (the norm of its rows), a readout of one number per position, or an array `[rows]`; default the
            first hook.
        """
        return shown.highlight(self, by)

    def compare(self, other: Capture, hooks: str | Readout | Sequence[str | Readout] | None = None) -> Comparison:
        """How far another capture's rows are from these, for each hook and position that both have.

        Parameters
        ----------
        hooks
            Those to compare, patterns included; default all that both have and that have one array of rows.

        Raises
        ------
        InvalidJob
            Nothing is common, or the shapes differ.
        """
        return comparison.compare(self, other, hooks)

    def __repr__(self) -> str:
        return shown.summary(self)

    def _repr_html_(self) -> str:
        return shown.html_summary(self)


def _plain(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def tensor(array: np.ndarray) -> torch.Tensor:
    """A torch tensor of the same numbers and dtype (a copy)."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
