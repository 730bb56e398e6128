"""Token streams: each token once and in order, whatever is said twice, is lost, or comes out otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lenspool.card import ModelCard
from lenspool.errors import EngineFailed
from lenspool.generation import Generation
from lenspool.logprobs import Logprobs
from lenspool.streaming import Delta, Tell, TokenStream

TOKENS = [5, 3, 8, 1, 9]
TEXT = "ab cd ef"


def generation(card: ModelCard, tokens: list[int], text: str) -> Generation:
    return Generation(
        card,
        generation={"token_ids": tokens, "text": text, "finish_reason": "length"},
        prompt=[1],
        hooks=[],
        positions=np.arange(0),
        tokens=None,
        reader=lambda name: np.empty(0),
        cached=False,
        provenance={},
    )


def said(first: int, stop: int, offset: int, end: int, tokens: Sequence[int] = TOKENS, text: str = TEXT) -> Delta:
    return Delta(first, list(tokens[first:stop]), text[offset:end], offset)


async def heard(card: ModelCard, deltas: list[Delta], **result: Any) -> tuple[TokenStream, list[Delta]]:
    async def answer(tell: Tell) -> Generation:
        for delta in deltas:
            tell(delta)
            await asyncio.sleep(0)
        return generation(card, result.get("tokens", TOKENS), result.get("text", TEXT))

    stream = TokenStream(answer)
    with pytest.raises(RuntimeError, match="not been read"):
        _ = stream.result
    out = [delta async for delta in stream]
    assert [token for delta in out for token in delta.token_ids] == stream.token_ids
    assert "".join(delta.text for delta in out) == stream.text
    at = 0
    for delta in out:
        assert delta.index == at and (delta.token_ids or delta.text)
        at += len(delta.token_ids)
    return stream, out


@pytest.mark.parametrize(
    "deltas",
    [
        [],
        [said(0, 2, 0, 2), said(2, 3, 2, 5), said(3, 5, 5, 8)],
        [said(0, 2, 0, 2), said(0, 2, 0, 2), said(2, 3, 2, 5)],  # a lost reply
        [said(0, 3, 0, 4), said(0, 1, 0, 1), said(1, 4, 1, 6), said(4, 5, 6, 8)],  # another attempt
        [said(0, 1, 0, 1), said(3, 5, 5, 8)],  # a hole
        [said(2, 3, 2, 5)],  # the beginning has been dropped
        [said(0, 2, 0, 0), said(2, 5, 0, 3)],  # text is held back
        [said(0, 5, 0, 8), said(0, 5, 0, 8)],
    ],
)
async def test_every_token_once(card: ModelCard, deltas: list[Delta]) -> None:
    stream, out = await heard(card, deltas)
    assert stream.exact and stream.token_ids == TOKENS and stream.text == TEXT
    assert stream.result.token_ids == TOKENS and stream.result.text == TEXT
    if deltas and deltas[0].index == 0:
        assert out[0] == deltas[0], "not held back until the end"


async def test_another_sample_is_not_mixed_in(card: ModelCard) -> None:
    other, words = [5, 3, 7, 7, 7, 7], "ab xx yy"
    deltas = [said(0, 3, 0, 4), said(0, 2, 0, 2, other, words), said(2, 6, 2, 8, other, words)]
    stream, _ = await heard(card, deltas, tokens=other, text=words)
    assert stream.token_ids == TOKENS[:3] and not stream.exact
    assert stream.result.token_ids == other


async def test_a_result_that_differs_or_is_shorter_is_said(card: ModelCard) -> None:
    for tokens, text in (([5, 3, 8, 2], "ab cd"), ([5, 3], "ab"), (TOKENS, "ab")):
        stream, _ = await heard(card, [said(0, 4, 0, 5)], tokens=tokens, text=text)
        assert not stream.exact and stream.token_ids == TOKENS[:4] and stream.result.token_ids == tokens


async def test_errors_are_raised_by_the_loop_and_leaving_it_ends_the_call(card: ModelCard) -> None:
    async def fail(tell: Tell) -> Generation:
        tell(said(0, 1, 0, 1))
        raise EngineFailed("broken")

    stream, seen = TokenStream(fail), []
    with pytest.raises(EngineFailed, match="broken"):
        async for delta in stream:
            seen.append(delta)
    assert len(seen) == 1
    with pytest.raises(RuntimeError, match="once"):
        aiter(stream)

    ended = asyncio.Event()

    async def endless(tell: Tell) -> Generation:
        tell(said(0, 1, 0, 1))
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        raise AssertionError

    async for _ in TokenStream(endless):
        break
    await asyncio.wait_for(ended.wait(), 5)
    ended.clear()
    async with TokenStream(endless) as stream:
        async for _ in stream:
            break
    assert ended.is_set()


def test_log_probabilities_survive_their_json_form() -> None:
    random = np.random.default_rng(0)
    for n, k in ((3, 2), (1, 0), (0, 4)):
        made = Logprobs(
            random.integers(0, 9, n, dtype=np.int32),
            random.normal(size=n).astype(np.float32),
            random.integers(1, 9, n, dtype=np.int32),
            random.integers(0, 9, (n, k), dtype=np.int32),
            random.normal(size=(n, k)).astype(np.float32),
        )
        again = Logprobs.from_document(made.to_document())
        for name, array in vars(made).items():
            other = getattr(again, name)
            assert np.array_equal(other, array) and other.dtype == array.dtype and other.shape == array.shape
        assert len(again) == n
