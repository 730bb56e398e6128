from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from lenspool.broker import Broker
from lenspool.errors import PoolUnavailable


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ends(pid: int, timeout: float = 10.0) -> bool:
    end = time.monotonic() + timeout
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_private_socket_and_no_port() -> None:
    with Broker() as broker, redis.Redis.from_url(broker.url) as client:
        path = Path(broker.url.removeprefix("unix://"))
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert client.config_get("port") == {"port": "0"}
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", 6379), timeout=0.5):
            pass
        pid = broker.pid
    assert ends(pid) and not path.parent.exists()
    broker.stop()


def test_data_survive_a_crash_when_asked(tmp_path: Path) -> None:
    with Broker(tmp_path / "data", appendonly=True) as broker, redis.Redis.from_url(broker.url) as client:
        client.set("x", 1)
        broker.kill()
        with pytest.raises(redis.exceptions.ConnectionError):
            client.get("x")
        broker.start()
        assert client.get("x") == b"1"
    with Broker() as broker, redis.Redis.from_url(broker.url) as client:
        client.set("x", 1)
        broker.kill()
        broker.start()
        assert client.get("x") is None


def test_memory_bound_refuses_instead_of_evicting() -> None:
    with Broker(max_memory=3_000_000) as broker, redis.Redis.from_url(broker.url) as client:
        client.set("x", b"y" * 500_000)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            for n in range(20):
                client.set(f"x{n}", b"y" * 500_000)
        assert client.strlen("x") == 500_000


def test_dies_with_its_parent() -> None:
    script = "from lenspool.broker import Broker; b = Broker().start(); print(b.pid, b.url, flush=True); input()"
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdin is not None
    pid, url = parent.stdout.readline().split()
    assert alive(int(pid))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert ends(int(pid))
    folder = Path(url.removeprefix("unix://")).parent
    end = time.monotonic() + 5
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not folder.exists()
    parent.stdin.close()
    parent.stdout.close()


def test_start_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(PoolUnavailable, match=r"(?i)manifest"):
        Broker(tmp_path, appendonly=True).start()
