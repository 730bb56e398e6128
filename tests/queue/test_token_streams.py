"""Tokens on their way through Redis: worker's end and client's end, without an engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from lenspool import keys
from lenspool.broker import Broker
from lenspool.queue import JobQueue
from lenspool.streaming import Delta
from lenspool.token_feed import TokenFeed
from lenspool_worker.token_streams import TokenStreams
from tests.queue.conftest import CARD, until

WORDS = ["the ", "quick ", "brown ", "fox ", "jumps ", "over "]


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    with Broker(tmp_path / "data", appendonly=True) as running:
        yield running


@contextlib.asynccontextmanager
async def worker(broker: Broker) -> AsyncIterator[TokenStreams]:
    """A worker's end that listens for announcements."""
    async with redis.asyncio.Redis.from_url(broker.url) as connection:
        streams = TokenStreams(connection, CARD)
        watching = asyncio.create_task(streams.watch())
        try:
            yield streams
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


@contextlib.asynccontextmanager
async def feed(broker: Broker) -> AsyncIterator[TokenFeed]:
    queue = JobQueue(broker.url)
    await queue.open()
    made = TokenFeed(queue, broker.url)
    try:
        yield made
    finally:
        await made.close()
        await queue.close()


class Ear:
    """Joins what it is told, which must fit together."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.calls = 0

    def __call__(self, delta: Delta) -> None:
        self.calls += 1
        assert delta.index <= len(self.tokens) and delta.offset <= len(self.text)
        self.tokens[delta.index :] = delta.token_ids
        self.text = self.text[: delta.offset] + delta.text


async def run(streams: TokenStreams, job_id: str, pause: float = 0.01, words: list[str] = WORDS) -> bool:
    """Generate as an engine does; True when somebody was told."""
    tokens: list[int] = []
    text = ""
    with streams.following(job_id) as follower:
        for i, word in enumerate(words):
            tokens.append(i)
            text += word
            if follower.wanted:
                follower.tell(tokens, text)
            await asyncio.sleep(pause)
        return follower.wanted


async def test_all_who_listen_hear_everything(broker: Broker) -> None:
    async with worker(broker) as streams, feed(broker) as one, feed(broker) as two:
        ears = [Ear() for _ in range(4)]
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(one.listening(CARD, "job", ears[0]))
            await until(lambda: "job" in streams._announced)
            running = asyncio.create_task(run(streams, "job", 0.1))
            await until(lambda: len(ears[0].tokens) >= 2)
            for listener, ear in ((one, ears[1]), (two, ears[2])):  # late: they hear of the beginning, too
                await stack.enter_async_context(listener.listening(CARD, "job", ear))
            assert await running
            await stack.enter_async_context(two.listening(CARD, "job", ears[3]))  # when it is over
            for ear in ears:
                await until(lambda ear=ear: ear.text == "".join(WORDS))
                assert ear.tokens == list(range(len(WORDS)))
        assert not one._jobs and not two._jobs


async def test_an_announcement_reaches_jobs_that_run_and_workers_that_come_later(broker: Broker) -> None:
    async with feed(broker) as client, worker(broker) as streams:
        ear = Ear()
        running = asyncio.create_task(run(streams, "running", 0.2))
        await asyncio.sleep(0.3)
        async with client.listening(CARD, "running", ear):
            assert await running
            await until(lambda: ear.text == "".join(WORDS))
        later = Ear()
        async with client.listening(CARD, "later", later), worker(broker) as second:
            await until(lambda: "later" in second._announced)
            assert await run(second, "later")
            await until(lambda: later.text == "".join(WORDS))


async def test_nobody_listens_and_nothing_is_sent(broker: Broker) -> None:
    async with worker(broker) as streams, redis.asyncio.Redis.from_url(broker.url) as look:
        await asyncio.sleep(0.3)
        before = (await look.info("stats"))["total_commands_processed"]
        assert not any(await asyncio.gather(*(run(streams, f"job{i}") for i in range(50))))
        assert (await look.info("stats"))["total_commands_processed"] - before <= 3  # those of this test
        assert await look.keys("*") == []


async def test_tokens_of_one_turn_leave_together(broker: Broker) -> None:
    async with worker(broker) as streams, feed(broker) as client, contextlib.AsyncExitStack() as stack:
        ears = {f"job{i}": Ear() for i in range(30)}
        for job_id, ear in ears.items():
            await stack.enter_async_context(client.listening(CARD, job_id, ear))
        await until(lambda: len(streams._announced) == 30)
        many = ["x"] * 2000
        await asyncio.gather(*(run(streams, job_id, 0, many) for job_id in ears))
        for ear in ears.values():
            await until(lambda ear=ear: ear.text == "x" * 2000)
            assert ear.calls < 1000, "what is made while a pipeline is under way joins the next"
        async with redis.asyncio.Redis.from_url(broker.url) as look:
            assert 0 < await look.ttl(keys.tokens("job0")) <= keys.TOKENS_TTL


async def test_a_second_attempt_is_heard_from_its_beginning(broker: Broker) -> None:
    async with feed(broker) as client:
        ear = Ear()
        async with client.listening(CARD, "job", ear):
            async with worker(broker) as first:
                await until(lambda: "job" in first._announced)
                await run(first, "job", words=WORDS[:3])
                await until(lambda: len(ear.tokens) == 3)
            async with worker(broker) as second:
                await until(lambda: "job" in second._announced)
                assert await run(second, "job")
            await until(lambda: ear.text == "".join(WORDS))


async def test_restart_of_redis_in_the_middle(broker: Broker) -> None:
    async with worker(broker) as streams, feed(broker) as client:
        ear = Ear()
        async with client.listening(CARD, "job", ear):
            await until(lambda: "job" in streams._announced)
            running = asyncio.create_task(run(streams, "job", 0.5, WORDS * 3))
            await until(lambda: len(ear.tokens) >= 2)
            broker.kill()
            await asyncio.sleep(0.5)
            broker.start()
            assert await running
            # what was made meanwhile is sent with what comes after
            await until(lambda: len(ear.tokens) > 12)
            assert ear.tokens == list(range(len(ear.tokens))) and "".join(WORDS * 3).startswith(ear.text)
