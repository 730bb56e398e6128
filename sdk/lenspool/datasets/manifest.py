"""A finished dataset: its sequences by number, and their activations where they lie in the store."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from lenspool import entries
from lenspool.card import HookInfo, ModelCard
from lenspool.datasets.example import Example
from lenspool.datasets.folder import Folder
from lenspool.datasets.mapped import Mapped, map_tokens
from lenspool.datasets.place import pin_name, store_of
from lenspool.datasets.statistics import Statistics
from lenspool.errors import InvalidJob
from lenspool.hooks import resolve
from lenspool.job import Request, closed
from lenspool.progress import tracked
from lenspool.readouts import Readout, from_text
from lenspool_cache import Store
from lenspool_cache import ranges as rg
from lenspool_cache.codec import dtype_of

if TYPE_CHECKING:
    from lenspool.datasets.loading import SequenceDataset, TokenDataset


class Dataset:
    """The activations of many prompts: a manifest that refers to entries of a store.

    A sequence of it by number, `dataset[3]`, is read from the store when it is looked at, and so is everything else
    here; nothing is copied unless its method says so. No pool needs to run. It can be pickled, and read in processes
    that were forked.

    Parameters
    ----------
    folder
        Of the dataset.
    store
        Folder of the store; default where it was when the dataset was made, or around the dataset's folder.

    Raises
    ------
    InvalidJob
        There is no dataset, or it is not finished: `Client.dataset` goes on with it.
    CacheError
        The store is not there, or is another one.

    Attributes
    ----------
    folder
        Where it is.
    card
        The model.
    hooks
        Hooks and readouts that it has, as they are asked for.
    spec
        What was asked for.
    hash
        SHA-256 over all of that, the tokens, the rows' columns and the failures: equal for equal datasets, whatever
        happened while they were made.
    """

    def __init__(self, folder: str | os.PathLike[str], store: str | os.PathLike[str] | None = None) -> None:
        self._files = Folder(folder)
        self.folder = self._files.path
        document, manifest = self._files.document(), self._files.manifest()
        if document is None or manifest is None:
            state = "holds no dataset" if document is None else "holds a dataset that is not finished"
            raise InvalidJob("folder", f"{self.folder} {state}", "one that Client.dataset has finished")
        self.name: str = document["about"]["name"]
        self.spec: dict[str, Any] = document["spec"]
        self.card = ModelCard.from_dict(document["about"]["card"])
        self.hooks: list[str] = self.spec["hooks"]
        self.hash: str = manifest["hash"]
        self.n_rows: int = manifest["rows"]
        self.n_tokens: int = manifest["tokens"]
        self._failures: int = manifest["failures"]
        self._chunks: int = manifest["chunks"]
        self._store_path = store_of(self.folder, document["about"]["store"], store)
        self._open()

    def _open(self) -> None:
        self._store = Store(self._store_path, read_only=True)
        self._index = np.load(self._files.index_path, mmap_mode="r")
        self._latest: tuple[int, dict[str, Any]] = (-1, {})

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_store", "_index", "_latest")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    # -- sequences

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self._index)

    @overload
    def __getitem__(self, number: int) -> Example: ...

    @overload
    def __getitem__(self, number: slice) -> list[Example]: ...

    def __getitem__(self, number: int | slice) -> Example | list[Example]:
        """A sequence by its number, negative from the end; or those of a slice."""
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        document, request = self._request(number)
        ranges = closed(request.ranges, len(request.tokens))
        provenance = {"model": self.card.id, "keys": {name: request.run.entry(name).hex() for name in request.hooks}}
        return Example(
            document,
            card=self.card,
            hooks=request.hooks,
            positions=np.array(rg.positions(ranges), dtype=np.int64),
            token_ids=request.tokens,
            tokens=None,
            reader=lambda name: self._read(request, name),
            cached=True,
            provenance=provenance,
        )

    def __iter__(self) -> Iterator[Example]:
        return (self[number] for number in range(len(self)))

    def of_row(self, row: int) -> list[Example]:
        """The sequences in which a row has tokens; none where it failed.

        Raises
        ------
        IndexError
            There is no such row.
        """
        if not 0 <= row < self.n_rows:
            raise IndexError(f"row {row} of {self.n_rows}")
        firsts = self._index[:, 3]
        number = max(int(np.searchsorted(firsts, row, "left")) - 1, 0)
        found = []
        while number < len(self) and firsts[number] <= row:
            if any(number_of == row for number_of, _, _ in self._document(number)["rows"]):
                found.append(self[number])
            number += 1
        return found

    def failures(self) -> Iterator[dict[str, Any]]:
        """Rows that have no activations: `row`, `error` (its type), `message`, and whether it may pass."""
        if not self._failures:
            return
        for chunk in range(self._chunks):
            if (self._files.header(chunk) or {})["failures"]:
                documents = (self._files.read(chunk, place, len(text)) for place, text in self._files.lines(chunk))
                yield from (document for document in documents if "error" in document)

    def positions(self, number: int, hook: str | Readout | None = None) -> np.ndarray:
        """int64 `[rows]`: positions of a sequence that have rows: of all, or of a hook (a loss has one less)."""
        _, request = self._request(number)
        ranges = request.ranges if hook is None else request.ranges_of(self._stored(request, self.column(hook)))
        return np.array(rg.positions(closed(ranges, len(request.tokens))), dtype=np.int64)

    def token_ids(self, number: int, hook: str | Readout | None = None) -> np.ndarray:
        """int64 `[rows]`: tokens at `positions`."""
        return np.array(self._document(number)["tokens"], dtype=np.int64)[self.positions(number, hook)]

    # -- one hook

    def column(self, hook: str | Readout) -> str:
        """A hook or readout of this dataset as `hooks` names it.

        Raises
        ------
        InvalidJob
            It has none such, or several.
        """
        if isinstance(hook, str) and hook in self.hooks:
            return hook
        readout = hook if isinstance(hook, Readout) else from_text(hook) if entries.is_readout(hook) else None
        found: list[str] = []
        try:
            names = resolve(readout.hook if readout else hook, self.card)  # type: ignore[arg-type]
        except InvalidJob as error:
            raise InvalidJob("hook", error.reason, ", ".join(self.hooks)) from None
        for name in names:
            if readout is None:
                found += [name] if name in self.hooks else []
                continue
            of_hook = (one for one in self.hooks if one.startswith(f"{name}|"))
            found += [one for one in of_hook if readout.matches(entries.parse(one))]
        if len(found) != 1:
            raise InvalidJob("hook", f"{hook} is {len(found)} of this dataset's", ", ".join(self.hooks))
        return found[0]

    def width(self, hook: str | Readout) -> int:
        """Numbers per token of a hook or readout."""
        return self._info(self.column(hook)).width

    def dtype(self, hook: str | Readout) -> np.dtype:
        """The numbers' type, as they are stored; bfloat16 is `ml_dtypes.bfloat16`."""
        return dtype_of(self._info(self.column(hook)).dtype or self.card.dtype)

    def matrix(self, number: int, hook: str | Readout) -> np.ndarray:
        """Rows of one hook of a sequence, `[rows, width]`: heads and the like as one dimension.

        Raises
        ------
        InvalidJob
            The hook has no rows of one width (attention patterns), or the readout no single array.
        """
        name = self.column(hook)
        self._info(name)
        _, request = self._request(number)
        return self._read(request, self._stored(request, name))

    def _info(self, name: str) -> HookInfo:
        if entries.is_readout(name):
            stored = entries.parse(name).stored
            if len(stored) != 1:
                raise InvalidJob("hook", f"{name} is several arrays", "a hook, or a readout of one array")
            return entries.info(stored[0], self.card)
        info = self.card.hooks[name]
        if not info.width:
            raise InvalidJob("hook", f"rows of {name} are as wide as the prompt is long", "a hook of one width")
        return info

    def statistics(self, hook: str | Readout, *, skip: int = 0, progress: bool = False) -> Statistics:
        """Mean, standard deviation and norms of a hook's rows, in one walk through all of them.

        Parameters
        ----------
        skip
            Positions at the start of each sequence that are left out: the first is an attention sink in many models.
        progress
            Show a bar, in a terminal (on stderr) or notebook only.
        """
        name, found = self.column(hook), Statistics(self.width(hook))
        for number in tracked(range(len(self)), progress, "statistics"):
            found.add(self.matrix(number, name)[self.positions(number, name) >= skip])
        return found

    def memmap(
        self,
        hook: str | Readout,
        folder: str | os.PathLike[str] | None = None,
        dtype: Any | None = None,
        *,
        progress: bool = False,
    ) -> Mapped:
        """All rows of a hook as one array in a file, `[tokens, width]`; a copy, made at the first call.

        Parameters
        ----------
        folder
            Where it is kept; default `arrays` in the dataset's folder.
        dtype
            Default as stored, bfloat16 as float32: files of numpy have no bfloat16.
        progress
            Show a bar, in a terminal (on stderr) or notebook only.
        """
        place = Path(folder) if folder is not None else self.folder / "arrays"
        return map_tokens(self, self.column(hook), place, dtype, progress)

    def torch(self, *hooks: str | Readout) -> SequenceDataset:
        """A `torch.utils.data.Dataset` of sequences; see `lenspool.datasets.loading`."""
        from lenspool.datasets.loading import SequenceDataset

        return SequenceDataset(self, [self.column(hook) for hook in hooks or self.hooks])

    def torch_tokens(self, hook: str | Readout, batch_size: int = 4096, **options: Any) -> TokenDataset:
        """A `torch.utils.data.IterableDataset` of shuffled batches of tokens' rows.

        See `lenspool.datasets.loading`.
        """
        from lenspool.datasets.loading import TokenDataset

        return TokenDataset(self, self.column(hook), batch_size, **options)

    # -- keeping

    def release(self) -> int:
        """Give up the pins of this dataset: its rows may be evicted from now on; how many pins there were."""
        with Store(self._store_path) as store:
            prefix = f"{pin_name(self.name, self.spec)}."
            return sum(store.pins.remove(name) for name in store.pins.all() if name.startswith(prefix))

    def __repr__(self) -> str:
        failed = f", {self._failures} rows failed" if self._failures else ""
        counts = f"{len(self)} sequences of {self.n_rows} rows, {self.n_tokens} tokens{failed}"
        return f"<Dataset {self.name!r} of {self.card.name}: {counts}; {', '.join(self.hooks)}>"

    # -- inside

    def _document(self, number: int) -> dict[str, Any]:
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sequence {number} of {len(self)}")
        number %= len(self)
        if self._latest[0] != number:
            chunk, place, length, _ = map(int, self._index[number])
            self._latest = number, self._files.read(chunk, place, length)
        return self._latest[1]

    def _request(self, number: int) -> tuple[dict[str, Any], Request]:
        document = self._document(number)
        request = Request(
            self.card,
            document["tokens"],
            document.get("hooks", self._stored_hooks),
            [(start, stop) for start, stop in document["ranges"]],
            document.get("interventions", []),
            {},
        )
        return document, request

    @staticmethod
    def _stored(request: Request, name: str) -> str:
        """The entry of a request that a hook or readout of one array is in: a reduction's has its positions."""
        if not entries.is_readout(name) or not entries.parse(name).reduces:
            return name
        return next(stored for stored in request.hooks if entries.is_readout(stored) and _matches(stored, name))

    @property
    def _stored_hooks(self) -> list[str]:
        out = []
        for name in self.hooks:
            out += [e.name for e in entries.parse(name).stored] if entries.is_readout(name) else [name]
        return out

    def _read(self, request: Request, name: str) -> np.ndarray:
        return self._store.rows(request.run, name, closed(request.ranges_of(name), len(request.tokens)))


def _matches(stored: str, shown: str) -> bool:
    one, other = entries.parse(stored), entries.parse(shown)
    return (one.hook, one.op, one.lens) == (other.hook, other.op, other.lens)
