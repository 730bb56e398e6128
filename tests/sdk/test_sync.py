"""The sync twin: the same methods with the same arguments, anywhere but inside a running loop."""

from __future__ import annotations

import asyncio
import inspect
import sys
import types
import warnings
from typing import Any

import pytest

import lenspool
from lenspool import handle, streaming, sync
from lenspool.loop_thread import LoopThread
from lenspool.testing import FakePool

ONLY_SYNC = {"run", "close"}
"""What makes an async function of a client, a recipe, usable; the stream's `aclose`."""


def public(kind: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}


def parameters(function: Any) -> list[tuple[str, Any, Any, str]]:
    """Names, kinds, defaults and annotations; the twin writes `aio.Prompt` for `Prompt`."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default, str(p.annotation).replace("aio.", "")) for p in found]


@pytest.mark.parametrize(
    ("original", "twin", "least"),
    [(lenspool.Client, sync.Client, 18), (handle.Job, sync.Job, 4), (streaming.TokenStream, sync.TokenStream, 0)],
)
def test_every_public_method_has_its_twin(original: type, twin: type, least: int) -> None:
    theirs, ours = public(original), public(twin)
    theirs.pop("aclose", None)
    assert theirs.keys() <= ours.keys()
    own = {name for name in ours.keys() - theirs.keys() if not isinstance(ours[name], property)}
    assert own <= ONLY_SYNC
    methods = {name: method for name, method in theirs.items() if inspect.isfunction(method)}
    assert len(methods) >= least
    for name, method in methods.items():
        assert parameters(method) == parameters(ours[name]), name
        assert not inspect.iscoroutinefunction(ours[name]) and not inspect.isasyncgenfunction(ours[name])
        assert f"`lenspool.{original.__name__}.{name}`" in (ours[name].__doc__ or ""), name


def test_clients_are_made_with_the_same_arguments() -> None:
    assert parameters(lenspool.Client) == parameters(sync.Client)
    assert parameters(lenspool.connect_local) == parameters(sync.connect_local)


def test_attributes_of_a_client_are_those_of_its_twin() -> None:
    with_attributes = {name for name in vars(FakePool().client()) if not name.startswith("_")}
    assert with_attributes == {"url", "model"} <= set(public(sync.Client))


@pytest.fixture
def twin() -> Any:
    client = sync.Client._of(LoopThread(), FakePool().client())
    with client:
        yield client


def test_calls_wait_for_their_answers(twin: sync.Client) -> None:
    view = twin.with_options(timeout=60)
    hook = "resid_post.0"
    assert view.capture("abc", hook)[hook].shape[0] == 3
    in_order = [result.token_ids for result in view.map(["a", "b"], hook)]
    assert dict(enumerate(in_order)) == {i: result.token_ids for i, result in twin.as_completed(["a", "b"], hook)}
    assert len(twin.generate("abc", n=2, temperature=1.0, max_tokens=3)) == 2
    assert "".join(delta.text for delta in twin.stream("abc", max_tokens=4)) == twin.generate("abc", max_tokens=4).text
    assert twin.plan(["a", "bc"], hook).prompts == 2


async def test_inside_a_running_loop_it_says_what_to_do(twin: sync.Client) -> None:
    with pytest.raises(RuntimeError, match=r"use lenspool\.Client .* await.*to_thread"):
        twin.capture("abc", "resid_post.0")
    with pytest.raises(RuntimeError, match="running event loop"):
        next(twin.map(["abc"], "resid_post.0"))
    result = await asyncio.to_thread(twin.capture, "abc", "resid_post.0")
    assert len(result.token_ids) == 3


def test_the_loop_of_a_notebook_may_be_blocked(twin: sync.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a cell is run: inside the kernel's loop. `examples/tour.ipynb` does it in a real one."""
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]

    async def cell() -> int:
        return len(twin.capture("abc", "resid_post.0").token_ids)

    assert asyncio.run(cell()) == 3


def test_a_closed_client_says_so_and_may_be_closed_again() -> None:
    client = FakePool().sync_client()
    assert client.capture("abc", "resid_post.0").token_ids == [64, 65, 66]
    client.close()
    client.close()
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="client was closed"):
        warnings.simplefilter("error")  # a coroutine that is never awaited
        client.capture("abc", "resid_post.0")
