"""The doctor: each fault of a setup is found, and what to do is said."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from lenspool.broker import Broker
from lenspool.cli import app
from lenspool.doctor import Finding
from lenspool.doctor.broker import check_broker
from lenspool.doctor.machine import check_model_folder, check_versions
from lenspool.doctor.pool import check_store, check_workers
from lenspool.testing import fake_card
from lenspool_cache import Store


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker(max_memory=64 * 2**20) as server:
        yield server


def worst(findings: list[Finding], about: str) -> Finding:
    order = ["ok", "note", "warning", "error"]
    return max((f for f in findings if f.about == about), key=lambda f: order.index(f.state))


async def test_a_good_server_is_good(broker: Broker) -> None:
    found = await check_broker(broker.url)
    assert {f.state for f in found} <= {"ok", "note"}
    assert "valkey" in worst(found, "redis version").said and "64 MiB" in worst(found, "redis memory").said


async def test_a_server_that_would_lose_jobs(broker: Broker) -> None:
    with redis.Redis.from_url(broker.url) as server:
        server.config_set("maxmemory-policy", "allkeys-lru")
        found = worst(await check_broker(broker.url), "redis memory")
        assert found.state == "error" and "CONFIG SET maxmemory-policy noeviction" in found.advice
        server.config_set("maxmemory-policy", "noeviction")
        server.config_set("maxmemory", 2**20)
        found = worst(await check_broker(broker.url), "redis memory")
        assert found.state == "warning" and "raise maxmemory" in found.advice
        server.config_set("maxmemory", 64 * 2**20)


async def test_a_server_that_does_not_answer_or_asks_who_it_is(broker: Broker) -> None:
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))  # taken, and nobody listens
        (found,) = await check_broker(f"redis://user:secret@127.0.0.1:{port.getsockname()[1]}")
    assert found.state == "error" and "lenspool up" in found.advice and "secret" not in found.said
    (found,) = await check_broker("http://example.invalid")
    assert found.state == "error" and "redis://" in found.advice
    with redis.Redis.from_url(broker.url) as server:
        server.execute_command("ACL", "SETUSER", "meek", "on", ">word", "+ping", "+time", "+hello", "+client")
    found = worst(await check_broker(broker.url.replace("unix://", "unix://meek:word@")), "redis version")
    assert found.state == "note" and "INFO" in found.said
    (found,) = await check_broker(broker.url.replace("unix://", "unix://meek:wrong@"))
    assert found.state == "error" and "user and password" in found.advice


def test_workers_and_the_model_that_is_asked_for() -> None:
    card = fake_card()
    assert check_workers([], None)[0].state == "error"
    assert {f.state for f in check_workers([card], card.name)} == {"ok"}
    assert worst(check_workers([card], "other"), "model").advice.endswith(card.name)
    assert worst(check_workers([card, card], None), "model").state == "warning"


def test_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = fake_card()
    empty = tmp_path / "empty"
    assert check_store(None, [])[0].state == "note" and check_store(False, [card])[0].state == "note"
    assert check_store(str(empty), [card])[0].state == "error"
    assert check_store(str(empty), [])[0].state == "note"
    with Store(tmp_path / "rows"):
        pass
    found = worst(check_store(str(tmp_path / "rows"), [card]), "store")
    assert found.state == "error" and "another store" in found.said
    assert {f.state for f in check_store(str(tmp_path / "rows"), [])} <= {"ok", "warning"}  # a full disk is a warning
    monkeypatch.setattr("lenspool.doctor.pool._LITTLE", 2**60)
    assert worst(check_store(str(tmp_path / "rows"), []), "disk").state == "warning"
    (tmp_path / "rows" / "store.json").write_text("{")
    assert "verify" in worst(check_store(str(tmp_path / "rows"), []), "store").advice


def test_model_folders(tmp_path: Path) -> None:
    def said(state: str) -> str:
        found = max(check_model_folder(tmp_path), key=lambda f: f.state == state)
        assert found.state == state
        return found.said

    assert "config.json" in said("error")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert "without weights" in said("error")
    weights = tmp_path / "model-1.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1")
    assert "less than 1 KiB" in said("error")
    weights.write_bytes(bytes(4096))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": weights.name, "b": "model-2.safetensors"}}))
    assert "model-2.safetensors are missing" in said("error")
    index.unlink()
    assert "LlamaForCausalLM" in said("ok") and "token ids" in said("note")


def test_versions_are_told() -> None:
    assert worst(check_versions(), "lenspool").said.startswith("0.1.0 on Python 3.")


def test_the_command(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENSPOOL_CONFIG", "")
    answer = CliRunner().invoke(app, ["doctor", "--redis", broker.url, "--json"])
    found = {f["about"]: f for f in json.loads(answer.output)}
    assert answer.exit_code == 1 and found["workers"]["state"] == "error" and found["redis"]["state"] == "ok"
    (tmp_path / "wrong.toml").write_text("redist = 1\n")
    monkeypatch.setenv("LENSPOOL_CONFIG", str(tmp_path / "wrong.toml"))
    answer = CliRunner().invoke(app, ["doctor", "--redis", broker.url])
    assert answer.exit_code == 1 and "redist: unknown setting" in answer.output and "correct the file" in answer.output
