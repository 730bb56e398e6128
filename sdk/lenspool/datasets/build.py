"""The job behind `Client.dataset`: chunk by chunk, each whole or not there, by any number of processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from lenspool import entries
from lenspool.arguments import check_names
from lenspool.datasets.claims import Claims
from lenspool.datasets.folder import Folder
from lenspool.datasets.manifest import Dataset
from lenspool.datasets.options import DatasetOptions
from lenspool.datasets.packing import Packing, Sequence
from lenspool.datasets.place import pin_name, place_of
from lenspool.datasets.sources import Source, SourceRow, digest
from lenspool.datasets.spec import Asked, spec_of
from lenspool.errors import CacheFull, InvalidJob, LenspoolError, PoolUnavailable, QueueFull
from lenspool.interventions import listed
from lenspool.job import Request, closed
from lenspool.many import in_flight
from lenspool.progress import progress_bar
from lenspool.readouts import Readout
from lenspool.result import Capture
from lenspool.sampling import check_integer
from lenspool_cache import Store
from lenspool_cache import ranges as rg

if TYPE_CHECKING:
    from lenspool.client.requesting import Requesting

_OPEN_CHUNKS = 3
"""Chunks that are worked on at once: while one waits for its last rows, the next ones keep the pool busy."""
_CHUNK, _CONCURRENCY = 512, 256
_LOOK_S, _BUSY_S = 0.2, 1.0


@dataclass(frozen=True)
class _Chunk:
    number: int
    rows: list[SourceRow]
    digest: str


class Build:
    """One process's part in making a dataset."""

    def __init__(
        self,
        client: Requesting,
        folder: Folder,
        store: Store,
        source: Source,
        asked: Asked,
        packing: Packing,
        chunk: int,
    ) -> None:
        self._client, self._folder, self._store = client, folder, store
        self._source, self._asked, self._packing, self._chunk_rows = source, asked, packing, chunk
        self._tried: set[int] = set()
        self._chunks = 0

    async def run(self, spec: dict[str, Any], about: dict[str, Any], concurrency: int, progress: bool) -> Dataset:
        """Do what is not done and nobody else does, wait for the others, and finish."""
        await asyncio.to_thread(self._folder.begin, spec, about)
        self._claims = Claims(self._folder.claims)
        self._claims.open()
        try:
            return await self._run(spec, about, concurrency, progress)
        finally:
            await asyncio.to_thread(self._claims.close)

    async def _run(self, spec: dict[str, Any], about: dict[str, Any], concurrency: int, progress: bool) -> Dataset:
        if self._source.once:  # what a dead driver has left must be seen the one time that its rows come by
            await self._claims.settled()
        self._spec, self._pin = spec, pin_name(about["name"], spec)
        self._seats = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        count = about["rows"]
        with progress_bar(progress, iter(()) if count is None else range(count), "dataset") as advance:
            held = await self._pass(None, advance)
            while held:
                freed = await self._freed(held)
                if freed and self._source.once:
                    reason = f"chunk {min(freed)} was left by another process, and these rows can be read only once"
                    raise InvalidJob("rows", reason, "the same call again")
                held = (held - freed) | await self._pass(freed, advance) if freed else set()
        await asyncio.to_thread(self._folder.finish, self._chunks)
        return Dataset(self._folder.path, store=self._store.path)

    async def _pass(self, wanted: set[int] | None, advance: Callable[[], None]) -> set[int]:
        """Walk through the rows once, and do what can be had of the wanted chunks; those that others have."""
        held: set[int] = set()
        chunks = self._claimed(wanted, held, advance)
        doing = in_flight(chunks, lambda chunk: self._do(chunk, advance), concurrency=_OPEN_CHUNKS, ordered=False)
        async with contextlib.aclosing(doing):
            async for _ in doing:
                pass
        return held

    def _claimed(self, wanted: set[int] | None, held: set[int], advance: Callable[[], None]) -> Iterator[_Chunk]:
        number = -1
        for number, rows in enumerate(self._source.chunks(self._chunk_rows)):
            if wanted is not None and number not in wanted:
                continue
            identity = digest(self._spec, rows)
            if self._is_done(number, identity):
                for _ in rows:
                    advance()
                continue
            if not self._claims.take(number):
                held.add(number)
            elif self._is_done(number, identity):  # by who had it a moment ago
                self._claims.release(number)
            else:
                self._tried.add(number)
                yield _Chunk(number, rows, identity)
        self._chunks = number + 1
        if surplus := [chunk for chunk in self._folder.done() if chunk > number]:
            reason = f"there are {self._chunks} chunks of them, and the dataset has chunk {surplus[-1]}"
            raise InvalidJob("rows", reason, "the rows that it was begun with, or another name")

    def _is_done(self, number: int, identity: str) -> bool:
        """Whether a chunk needs nothing more; failures that may pass are tried once more by each process."""
        header = self._folder.header(number)
        if header is None:
            return False
        if header["digest"] != identity:
            reason = f"rows {number * self._chunk_rows} and following are not those that the dataset was begun with"
            raise InvalidJob("rows", reason, "the same rows, or another name")
        return not header["passing"] or number in self._tried

    async def _freed(self, held: set[int]) -> set[int]:
        """Wait until all chunks are done, or some are free again; the free ones."""
        while True:
            left = {number for number in held if self._folder.header(number) is None}
            if not left:
                return set()
            if free := {number for number in left if self._claims.free(number)}:
                return free
            await asyncio.sleep(_LOOK_S)

    # -- one chunk

    async def _do(self, chunk: _Chunk, advance: Callable[[], None]) -> None:
        errors: dict[int, LenspoolError] = {}
        sequences = await self._sequences(chunk.rows, errors)
        requests: list[tuple[Sequence, Request]] = []
        refused: list[InvalidJob] = []
        for sequence in sequences:
            try:
                requests.append((sequence, await self._request(sequence.tokens)))
            except InvalidJob as error:
                refused.append(error)
                _charge(sequence, error, errors)
        if refused and not requests and not refused[0].field.startswith("prompt"):
            raise refused[0]  # the call is wrong, not the rows
        # before they run: no row is in the store for a moment in which it could be evicted
        keys = [request.run.key for _, request in requests]
        if keys:
            await asyncio.to_thread(self._store.pins.add, self._pin_of(chunk), keys)
        lines: dict[int, dict[str, Any]] = {}
        todo, pinned = list(range(len(requests))), set[bytes]()
        while todo:
            lent: dict[int, set[bytes]] = {}
            answers = in_flight(
                (requests[index][1] for index in todo),
                self._answer,
                concurrency=self._concurrency,
                ordered=False,
                return_exceptions=True,
            )
            async with contextlib.aclosing(answers):
                async for number, answer in answers:
                    sequence, request = requests[index := todo[number]]
                    lines.pop(index, None)
                    if not isinstance(answer, BaseException):
                        lines[index], lent[index] = _line(sequence, request), answer - pinned
                    elif isinstance(answer, LenspoolError) and not isinstance(answer, (PoolUnavailable, CacheFull)):
                        _charge(sequence, answer, errors)
                    else:
                        raise answer
            if elsewhere := set[bytes]().union(*lent.values()):
                await asyncio.to_thread(self._store.pins.add, f"{self._pin_of(chunk)}.{len(pinned)}", elsewhere)
                pinned |= elsewhere
            todo = [index for index in sorted(lent) if lent[index]]  # until they were pinned they could be evicted
        failures = [_failure(row, error) for row, error in sorted(errors.items())]
        header = {
            "chunk": chunk.number,
            "rows": len(chunk.rows),
            "digest": chunk.digest,
            "failures": len(failures),
            "passing": sum(error.retryable for error in errors.values()),
        }
        ordered = [lines[index] for index in sorted(lines)]
        found = self._folder.header(chunk.number)  # of before, or of a driver that took this one for dead
        if found is None or found["passing"] >= header["passing"]:
            await asyncio.to_thread(self._folder.put, chunk.number, header, [*ordered, *failures])
        for _ in chunk.rows:
            advance()
        await asyncio.to_thread(self._claims.release, chunk.number)

    def _pin_of(self, chunk: _Chunk) -> str:
        """A name that nobody else adds to, so that it takes no lock."""
        return f"{self._pin}.{chunk.number:08d}.{self._claims.driver}"

    async def _sequences(self, rows: Iterable[SourceRow], errors: dict[int, LenspoolError]) -> list[Sequence]:
        card, desk = await self._client._connect()
        tokenized = []
        for row in rows:
            try:
                tokenized.append((row, self._packing.tokens(card, desk.tokenizer, row.prompt)))
            except InvalidJob as error:
                errors[row.index] = error
            await asyncio.sleep(0)  # answers of other chunks come in meanwhile
        return list(self._packing.sequences(tokenized))

    async def _request(self, tokens: list[int]) -> Request:
        asked = self._asked
        options = {"positions": asked.positions, "interventions": asked.interventions}
        _, request = await self._client._request(tokens, asked.hooks, options)
        return request

    async def _answer(self, request: Request) -> set[bytes]:
        """Have the rows of a request in the store; keys of entries that they are in and that are not its run's own."""
        _, desk = await self._client._connect()
        async with self._seats:
            while True:
                try:
                    await self._client._answered(desk, request, Capture, self._asked.how)
                    length = len(request.tokens)
                    wanted = {name: closed(request.ranges_of(name), length) for name in request.hooks}
                    found = await asyncio.to_thread(self._store.find, request.run, wanted)
                    there = {name: [s.range for s in segments] for name, segments in found.items()}
                    if any(rg.subtract(ranges, there.get(name, [])) for name, ranges in wanted.items()):
                        continue  # evicted since the answer
                    keys = {segment.key for segments in found.values() for segment in segments}
                    return keys - {request.run.entry(name) for name in request.hooks}
                except QueueFull:
                    await asyncio.sleep(_BUSY_S)  # others wait, too; the pool lives, or this would be another error


def _charge(sequence: Sequence, error: LenspoolError, errors: dict[int, LenspoolError]) -> None:
    for span in sequence.spans:
        errors.setdefault(span.row.index, error)


def _failure(row: int, error: LenspoolError) -> dict[str, Any]:
    return {"row": row, "error": type(error).__name__, "message": str(error), "passing": error.retryable}


def _line(sequence: Sequence, request: Request) -> dict[str, Any]:
    """A sequence in the manifest: what its entries in the store are found by, and where its tokens are from."""
    document: dict[str, Any] = {
        "run": request.run.key.hex(),
        "tokens": request.tokens,
        "ranges": [list(r) for r in closed(request.ranges, len(request.tokens))],
        "rows": [[span.row.index, span.start, span.stop] for span in sequence.spans],
        "columns": [span.row.columns for span in sequence.spans],
    }
    if request.interventions:
        document["interventions"] = request.interventions
    if any(entries.is_readout(name) and entries.parse(name).reduces for name in request.hooks):
        document["hooks"] = (
            request.hooks
        )  # their names have the positions in them, which differ from sequence to sequence
    return document


async def build(client: Requesting, name: str, rows: Any, hooks: Any, **options: Unpack[DatasetOptions]) -> Dataset:
    """See `Client.dataset`."""
    check_names("dataset", options, DatasetOptions)
    card, desk = await client._connect()
    folder = place_of(desk.access.store, name, options.get("folder"))
    store = desk.access.store
    if store is None or store.read_only:
        state = "this client does not reach it" if store is None else "this client may not write to it"
        raise InvalidJob("store", f"a dataset refers to rows in the store, and pins them there, and {state}")
    asked = Asked(
        hooks=[hooks] if isinstance(hooks, (str, Readout)) else list(hooks),
        positions=options.get("positions", "all"),
        interventions=listed(options.get("interventions")),
        how=client._manner({"priority": "batch", **client._options, **options}),
    )
    source = Source(rows, options.get("prompt", "text"), options.get("columns"))
    lengths = (options.get(length) for length in ("context", "separator", "begin", "max_length"))
    packing = Packing.checked(card, desk.tokenizer, *lengths)  # type: ignore[arg-type]
    chunk = check_integer("chunk", options.get("chunk", _CHUNK), 1, None)
    concurrency = check_integer("concurrency", options.get("concurrency", _CONCURRENCY), 1, None)
    spec = spec_of(card, asked, packing, chunk)
    about = {
        "name": name,
        "card": card.to_dict(),
        "store": {"id": store.id, "path": str(store.path)},
        "rows": source.size,
    }
    job = Build(client, Folder(folder), store, source, asked, packing, chunk)
    return await job.run(spec, about, concurrency, options.get("progress", False))
