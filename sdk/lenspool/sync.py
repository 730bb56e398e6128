"""The client for scripts without asyncio: the same calls, each waiting for its answer."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from lenspool import client as aio
from lenspool import handle, local, streaming
from lenspool.card import HookInfo, ModelCard
from lenspool.datasets.manifest import Dataset
from lenspool.generation import Generation
from lenspool.interventions import ArrayRef
from lenspool.loop_thread import LoopThread
from lenspool.places import Tokens
from lenspool.plan import Plan
from lenspool.result import Capture
from lenspool.worker_options import WorkerOptions

P = ParamSpec("P")
T = TypeVar("T")


class TokenStream:
    """The sync twin of `lenspool.streaming.TokenStream`: `for delta in client.stream(prompt)`."""

    def __init__(self, loop: LoopThread, stream: streaming.TokenStream) -> None:
        self._loop, self._stream = loop, stream

    def __iter__(self) -> Iterator[streaming.Delta]:
        return self._loop.iterate(self._stream.__aiter__)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the job up, if it still runs."""
        self._loop.run(self._stream.aclose())

    @property
    def result(self) -> Generation:
        """See `lenspool.streaming.TokenStream.result`."""
        return self._stream.result

    @property
    def token_ids(self) -> list[int]:
        """The tokens yielded so far."""
        return self._stream.token_ids

    @property
    def text(self) -> str:
        """The text yielded so far."""
        return self._stream.text

    @property
    def exact(self) -> bool:
        """See `lenspool.streaming.TokenStream`."""
        return self._stream.exact


class Job:
    """The sync twin of `lenspool.Job`."""

    def __init__(self, loop: LoopThread, job: handle.Job[Any]) -> None:
        self._loop, self._job = loop, job
        self.id = job.id

    def status(self) -> str:
        """See `lenspool.Job.status`."""
        return self._loop.run(self._job.status())

    def position(self) -> int | None:
        """See `lenspool.Job.position`."""
        return self._loop.run(self._job.position())

    def result(self, timeout: float | None = None) -> Any:
        """See `lenspool.Job.result`."""
        return self._loop.run(self._job.result(timeout))

    def cancel(self) -> None:
        """See `lenspool.Job.cancel`."""
        self._loop.run(self._job.cancel())


class Client:
    """The sync twin of `lenspool.Client`; the same arguments. `with` closes it; a notebook may leave it open."""

    def __init__(
        self,
        url: str | None = None,
        *,
        model: str | None = None,
        store: str | Path | Literal[False] | None = None,
        inline_limit: int | None = None,
        patience: float | None = None,
    ) -> None:
        inner = aio.Client(url, model=model, store=store, inline_limit=inline_limit, patience=patience)
        self._loop, self._client = LoopThread(), inner

    @classmethod
    def _of(cls, loop: LoopThread, inner: aio.Client) -> Self:
        client = cls.__new__(cls)
        client._loop, client._client = loop, inner
        return client

    def __enter__(self) -> Self:
        self._loop.run(self._client.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """See `lenspool.Client.close`."""
        if self._loop.closed:
            return
        try:
            self._loop.run(self._client.close())
        finally:
            self._loop.close()

    @property
    def url(self) -> str:
        """Redis of the pool."""
        return self._client.url

    @property
    def model(self) -> str | None:
        """Name of the model that is asked for."""
        return self._client.model

    def __repr__(self) -> str:
        return repr(self._client).replace("<", "<sync ", 1)

    def with_options(self, **options: Unpack[aio.Options]) -> Self:
        """See `lenspool.Client.with_options`."""
        return self._of(self._loop, self._client.with_options(**options))

    def twin(self) -> aio.Client:
        """See `lenspool.Client.twin`."""
        return self._client.twin()

    def models(self) -> list[ModelCard]:
        """See `lenspool.Client.models`."""
        return self._loop.run(self._client.models())

    def card(self) -> ModelCard:
        """See `lenspool.Client.card`."""
        return self._loop.run(self._client.card())

    def status(self) -> list[dict[str, Any]]:
        """See `lenspool.Client.status`."""
        return self._loop.run(self._client.status())

    def hooks(self) -> list[HookInfo]:
        """See `lenspool.Client.hooks`."""
        return self._loop.run(self._client.hooks())

    def tokens(self, prompt: aio.Prompt) -> Tokens:
        """See `lenspool.Client.tokens`."""
        return self._loop.run(self._client.tokens(prompt))

    def put(self, array: Any) -> ArrayRef:
        """See `lenspool.Client.put`."""
        return self._loop.run(self._client.put(array))

    def norms(self, hooks: str | Iterable[str], prompts: Iterable[aio.Prompt] | None = None) -> dict[str, float]:
        """See `lenspool.Client.norms`."""
        return self._loop.run(self._client.norms(hooks, prompts))

    def capture(self, prompt: aio.Prompt, hooks: aio.Hooks, **options: Unpack[aio.CaptureOptions]) -> Capture:
        """See `lenspool.Client.capture`."""
        return self._loop.run(self._client.capture(prompt, hooks, **options))

    @overload
    def generate(  # type: ignore[overload-overlap]  # 1 is the one int that gives no list
        self, prompt: aio.Prompt, *, n: Literal[1] = 1, **options: Unpack[aio.GenerateOptions]
    ) -> Generation: ...

    @overload
    def generate(self, prompt: aio.Prompt, *, n: int, **options: Unpack[aio.GenerateOptions]) -> list[Generation]: ...

    def generate(
        self, prompt: aio.Prompt, *, n: int = 1, **options: Unpack[aio.GenerateOptions]
    ) -> Generation | list[Generation]:
        """See `lenspool.Client.generate`."""
        return self._loop.run(self._client.generate(prompt, n=n, **options))

    def submit_capture(self, prompt: aio.Prompt, hooks: aio.Hooks, **options: Unpack[aio.SubmitOptions]) -> Job:
        """See `lenspool.Client.submit_capture`."""
        return Job(self._loop, self._loop.run(self._client.submit_capture(prompt, hooks, **options)))

    def submit_generate(self, prompt: aio.Prompt, **options: Unpack[aio.SubmitGenerateOptions]) -> Job:
        """See `lenspool.Client.submit_generate`."""
        return Job(self._loop, self._loop.run(self._client.submit_generate(prompt, **options)))

    def job(self, id: str) -> Job:
        """See `lenspool.Client.job`."""
        return Job(self._loop, self._client.job(id))

    def stream(self, prompt: aio.Prompt, **options: Unpack[aio.GenerateOptions]) -> TokenStream:
        """See `lenspool.Client.stream`."""
        return TokenStream(self._loop, self._client.stream(prompt, **options))

    def run(self, work: Callable[Concatenate[aio.Client, P], Awaitable[T]], *args: P.args, **options: P.kwargs) -> T:
        """Call an async function of a client, e.g. a recipe: `client.run(patching_sweep, clean, corrupt, ...)`."""

        async def call() -> T:
            return await work(self._client, *args, **options)

        return self._loop.run(call())

    def map(
        self,
        prompts: Iterable[aio.Prompt],
        hooks: aio.Hooks,
        *,
        ordered: bool = True,
        **options: Unpack[aio.ManyOptions],
    ) -> Iterator[Any]:
        """See `lenspool.Client.map`."""
        results = self._client.map(prompts, hooks, ordered=ordered, **options)
        return self._loop.iterate(lambda: results)

    def as_completed(
        self, prompts: Iterable[aio.Prompt], hooks: aio.Hooks, **options: Unpack[aio.ManyOptions]
    ) -> Iterator[tuple[int, Any]]:
        """See `lenspool.Client.as_completed`."""
        results = self._client.as_completed(prompts, hooks, **options)
        return self._loop.iterate(lambda: results)

    def plan(
        self,
        prompts: Iterable[aio.Prompt],
        hooks: aio.Hooks,
        *,
        positions: Any = "all",
        interventions: aio.Interventions = (),
        progress: bool = False,
    ) -> Plan:
        """See `lenspool.Client.plan`."""
        return self._loop.run(
            self._client.plan(prompts, hooks, positions=positions, interventions=interventions, progress=progress)
        )

    def dataset(self, name: str, rows: Any, hooks: aio.Hooks, **options: Unpack[aio.DatasetOptions]) -> Dataset:
        """See `lenspool.Client.dataset`."""
        return self._loop.run(self._client.dataset(name, rows, hooks, **options))

    def open_dataset(self, name: str) -> Dataset:
        """See `lenspool.Client.open_dataset`."""
        return self._loop.run(self._client.open_dataset(name))


@contextlib.contextmanager
def connect_local(
    model: str | Path,
    *,
    store: str | Path | None = None,
    engine: Mapping[str, Any] | None = None,
    compiled: bool = False,
    boot_timeout: float = 600.0,
    progress: bool = True,
    **options: Unpack[WorkerOptions],
) -> Iterator[Client]:
    """The sync twin of `lenspool.connect_local`; the same arguments."""
    loop = LoopThread()
    context = local.connect_local(
        model,
        store=store,
        engine=engine,
        compiled=compiled,
        boot_timeout=boot_timeout,
        progress=progress,
        **options,
    )
    try:
        inner = loop.run(context.__aenter__())
        try:
            yield Client._of(loop, inner)
        finally:
            loop.run(context.__aexit__(None, None, None))
    finally:
        loop.close()
