"""What an operator sees of jobs, and does to them: whoever asked for them."""

from __future__ import annotations

import asyncio
import json

import pytest
from typer.testing import CliRunner

from lenspool import keys
from lenspool.cli import app
from lenspool.errors import InvalidJob, JobCancelled
from lenspool.operating import Operator
from lenspool.orders import Orders
from lenspool.terms import Terms
from tests.queue.conftest import CARD, Connect, Pool, doc, started, until


async def test_jobs_are_seen_and_taken_out_of_the_queue(pool: Pool, connect: Connect) -> None:
    async with asyncio.timeout(30), connect() as one, connect() as two:
        first, second = (one.submit(CARD, doc(n)) for n in ("first", "second"))
        await until(lambda: pool.queued() == 2)
        batch = two.submit(CARD, doc("batch"), Terms("batch"))
        await until(lambda: pool.queued() == 3)
        operator = Operator(two)
        views = {view.id: view for view in await operator.jobs()}
        assert {job: view.state for job, view in views.items()} == dict.fromkeys(
            (first.id, second.id, batch.id), "waiting"
        )
        assert [views[t.id].position for t in (first, second, batch)] == [0, 1, 0]
        assert (views[batch.id].lane, views[batch.id].client, views[first.id].client) == ("batch", two.id, one.id)
        assert all(view.model == CARD and 0 <= view.seconds < 20 for view in views.values())
        assert await operator.jobs(model="other") == [] and len(await operator.jobs(limit=1)) == 2
        shared = two.submit(CARD, doc("second"))
        await until(lambda: pool.redis.scard(keys.waiters(second.id)) == 2)
        assert await operator.cancel(second.id[:8]) == second.id
        for ticket in (second, shared):  # all who wait are told, and nobody sends it again
            with pytest.raises(JobCancelled, match="cancelled"):
                await ticket.result()
        assert pool.queued() == 2
        pool.worker()
        assert (await first.result(), await batch.result()) == ({"n": "first"}, {"n": "batch"})
        assert pool.executions() == {"first": 1, "batch": 1}
        with pytest.raises(InvalidJob, match="finished"):
            await operator.cancel(first.id)
        with pytest.raises(InvalidJob, match="0 jobs begin"):
            await operator.cancel("0123456789")
        assert await operator.requeue(second.id) == second.id
        await until(lambda: pool.executions()["second"] == 1)


async def test_a_running_job_is_stopped_and_a_failed_one_runs_again(pool: Pool, connect: Connect) -> None:
    worker = pool.worker()
    async with asyncio.timeout(60), connect() as queue:
        operator = Operator(queue)
        await Orders(queue).place(CARD, doc("long", "sleep", s=600.0), Terms())
        long = queue.submit(CARD, doc("long", "sleep", s=600.0))
        await started(long)
        (view,) = await operator.jobs()
        assert view.state == "running" and view.worker and view.position is None
        await operator.cancel(long.id)
        with pytest.raises(JobCancelled):
            await long.result()
        while any(view.state == "running" for view in await operator.jobs()):
            await asyncio.sleep(0.05)
        bad = queue.submit(CARD, doc("bad", "fail"))
        with pytest.raises(InvalidJob):
            await bad.result()
        failed = {view.id: view for view in await operator.jobs() if view.state == "failed"}
        assert "out of range" in failed[bad.id].error and failed[bad.id].seconds < 30
        assert await operator.requeue(bad.id) == bad.id
        await until(lambda: pool.executions()["bad"] == 2)
        worker.signal(15)


def test_the_command_shows_cancels_and_says_what_is_wrong(pool: Pool, connect: Connect) -> None:
    async def fill() -> str:
        async with connect() as queue:
            await Orders(queue).place(CARD, doc(1), Terms("batch"))
            return (await Orders(queue).record(doc(1), {})) or ""

    job = asyncio.run(fill())

    def lenspool(*arguments: str) -> tuple[int, str]:
        answer = CliRunner().invoke(app, ["queue", "--redis", pool.url, *arguments])
        return answer.exit_code, answer.output

    code, shown = lenspool("--json")
    (view,) = json.loads(shown)
    assert code == 0 and (view["id"], view["lane"], view["position"]) == (job, "batch", 0)
    code, shown = lenspool()
    assert code == 0 and job[:12] in shown
    code, shown = lenspool("requeue", job)
    assert code == 1 and "queued" in shown
    code, shown = lenspool("cancel", job[:10], "--json")
    assert code == 0 and json.loads(shown) == {"cancelled": [job]}
    assert lenspool()[1].startswith("no job")
    code, shown = lenspool("cancel", job)
    assert code == 1 and "canceled" in shown
    assert lenspool("requeue", job) == (0, f"requeued {job}\n") and pool.queued() == 1
