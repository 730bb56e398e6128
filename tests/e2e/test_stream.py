"""Streams of tokens through a whole pool, and several samples of a prompt."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lenspool.sync
from lenspool import Client, Delta, InvalidJob, TokenStream, keys
from tests.e2e.conftest import counters

HOOK = "resid_post.10"


async def read(stream: TokenStream) -> list[tuple[float, Delta]]:
    return [(time.monotonic(), delta) async for delta in stream]


async def test_a_stream_is_the_generation_piece_by_piece(client: Client) -> None:
    prompt = "The streamed story begins with a"
    stream = client.stream(prompt, max_tokens=60, ignore_eos=True, hooks=HOOK, logprobs=2)
    deltas = await read(stream)
    result = stream.result
    assert stream.exact and stream.token_ids == result.token_ids and stream.text == result.text
    assert [t for _, d in deltas for t in d.token_ids] == result.token_ids
    assert "".join(d.text for _, d in deltas) == result.text
    assert len(deltas) > 10 and deltas[-1][0] - deltas[0][0] > 0.1, "as they are made"
    assert result[HOOK].shape == (len(result.prompt_token_ids) + 59, 576) and not result.cached
    assert result.logprobs is not None and result.logprobs.token_ids.tolist() == result.token_ids
    plain = await client.generate(prompt, max_tokens=60, ignore_eos=True, hooks=HOOK, logprobs=2)
    assert plain.cached and plain.token_ids == result.token_ids
    again = client.stream(prompt, max_tokens=60, ignore_eos=True, hooks=HOOK, logprobs=2)
    before = await counters(client)
    ((_, whole),) = await read(again)
    assert whole.token_ids == result.token_ids and whole.text == result.text and again.result.cached
    assert (await counters(client))["steps"] == before["steps"]
    more = client.stream(prompt, max_tokens=60, ignore_eos=True, hooks=[HOOK, "mlp_out.3"], logprobs=2)
    ((_, whole),) = await read(more)
    assert whole.token_ids == result.token_ids and more.result["mlp_out.3"].shape == result[HOOK].shape


async def test_who_streams_and_who_waits_share_one_run(client: Client) -> None:
    """A plain call comes first; streams join it while it runs, here and in clients with and without the store."""
    options: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "temperature": 0.9, "seed": 11}
    prompt = "Everybody listens to the same tale of"
    before = await counters(client)
    async with Client(client.url) as other, Client(client.url, store=False) as far:
        plain = asyncio.create_task(client.generate(prompt, **options))
        await asyncio.sleep(0.7)
        streams = [c.stream(prompt, **options) for c in (client, client, other, far)]
        answers = await asyncio.gather(*(read(stream) for stream in streams))
        result = await plain
    for stream, deltas in zip(streams, answers, strict=True):
        assert stream.exact and stream.token_ids == result.token_ids and stream.text == result.text
        assert stream.result.token_ids == result.token_ids
        assert len(deltas) > 5 and len(deltas[0][1].token_ids) > 1, "what was made before comes in one piece"
    after = await counters(client)
    assert after["tokens"] - before["tokens"] < 200, "it ran once"


async def test_stop_strings_do_not_show(client: Client) -> None:
    prompt = "Once upon a time there was a"
    free = await client.generate(prompt, max_tokens=40)
    assert free.text is not None
    stop = " ".join(free.text.split()[6:9])
    stream = client.stream(prompt, max_tokens=40, stop=stop)
    deltas = await read(stream)
    assert stream.result.finish_reason == "stop" and stream.result.text == free.text[: free.text.index(stop)]
    assert "".join(d.text for _, d in deltas) == stream.result.text and len(deltas) > 1


async def test_leaving_a_stream_cancels_its_job_unless_somebody_waits(client: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}

    async def live() -> int:
        return int((await counters(client))["live"])

    async for delta in client.stream("A tale that nobody hears to its end is", **options):
        assert delta.token_ids
        break
    async with asyncio.timeout(20):
        while await live():
            await asyncio.sleep(0.2)

    prompt = "A tale that somebody else still hears is"
    async with Client(client.url) as other:
        plain = asyncio.create_task(other.generate(prompt, max_tokens=200, ignore_eos=True))
        async with client.stream(prompt, max_tokens=200, ignore_eos=True) as stream:
            async for _ in stream:
                break
        assert len((await plain).token_ids) == 200


async def test_only_what_is_streamed_costs_traffic(client: Client) -> None:
    redis = client._queue.redis
    before = set(await redis.keys(keys.tokens("*")))
    await client.generate("Nobody streams this line of", max_tokens=30, ignore_eos=True)
    assert set(await redis.keys(keys.tokens("*"))) == before
    await read(client.stream("Somebody streams this line of", max_tokens=30, ignore_eos=True))
    (made,) = set(await redis.keys(keys.tokens("*"))) - before
    assert 0 < await redis.ttl(made) <= keys.TOKENS_TTL
    assert 0 < await redis.xlen(made) <= 30


async def test_fifty_streams_at_once(client: Client) -> None:
    prompts = [[100 + i, 7, 300 + 3 * i] for i in range(50)]
    streams = [client.stream(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts]
    answers = await asyncio.gather(*(read(stream) for stream in streams))
    for stream, prompt, deltas in zip(streams, prompts, answers, strict=True):
        assert stream.result.prompt_token_ids == prompt and stream.exact
        assert [t for _, d in deltas for t in d.token_ids] == stream.result.token_ids
    assert (await client._queue.redis.info("clients"))["connected_clients"] < 40


async def test_a_wrong_call_fails_at_the_first_step(client: Client) -> None:
    with pytest.raises(InvalidJob, match="max_tokens"):
        await read(client.stream("x", max_tokens=0))
    with pytest.raises(InvalidJob, match="max_logprobs"):
        await read(client.stream("x", logprobs=10_000))


def test_the_sync_twin_streams(client: Client, store: Path) -> None:
    with lenspool.sync.Client(client.url, store=store) as twin:
        stream = twin.stream("A synchronous story of", max_tokens=20, ignore_eos=True, hooks=HOOK)
        pieces = [delta.text for delta in stream]
        assert "".join(pieces) == stream.text == stream.result.text and len(pieces) > 1 and stream.exact
        assert stream.result[HOOK].shape[0] == len(stream.result.prompt_token_ids) + 19
        with twin.stream("A synchronous story left by", max_tokens=900, ignore_eos=True) as left:
            for _ in left:
                break
        samples = twin.generate("A synchronous story of", max_tokens=4, temperature=1.0, seed=1, n=2)
        assert len(samples) == 2


async def test_samples_of_one_prompt(client: Client) -> None:
    prompt = "The colours of the rainbow are"
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True, "hooks": HOOK}
    samples = await client.generate(prompt, n=4, seed=20, **options)
    assert len({tuple(s.token_ids) for s in samples}) > 1
    for i, sample in enumerate(samples):
        alone = await client.generate(prompt, seed=20 + i, **options)
        assert alone.cached and alone.token_ids == sample.token_ids
        assert np.array_equal(alone[HOOK], sample[HOOK]) and len(sample[HOOK]) == len(sample.prompt_token_ids) + 7
    free = await client.generate(prompt, n=3, **options)
    assert len(free) == 3 and not any(s.cached for s in free) and len({tuple(s.token_ids) for s in free}) > 1
    single = await client.generate(prompt, n=1, **options)
    assert single.finish_reason == "length"
    with pytest.raises(InvalidJob, match="temperature 0"):
        await client.generate(prompt, n=2)
    with pytest.raises(InvalidJob, match="seed"):
        await client.generate(prompt, n=2, temperature=1.0, seed=2**63 - 1)


async def test_log_probabilities_reach_every_client_and_are_kept(client: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 5, "logprobs": 4, "prompt_logprobs": 2}
    first = await client.generate("A likely story", **options)
    assert first.logprobs is not None and first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids) - 1
    assert first.logprobs.top_token_ids.shape == (len(first.token_ids), 4)
    async with Client(client.url, store=False) as far:
        again = await far.generate("A likely story", **options)
    second = await client.generate("A likely story", **options)
    assert second.cached
    for result in (again, second):
        assert result.logprobs is not None
        assert result.logprobs.logprobs.tobytes() == first.logprobs.logprobs.tobytes()
    plain = await client.generate("A likely story", max_tokens=5)
    assert plain.logprobs is None and plain.token_ids == first.token_ids
