"""The commands, against the running pool."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lenspool import Client


async def run(client: Client, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "lenspool.cli",
        arguments[0],
        "--redis",
        client.url,
        *arguments[1:],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def ask(client: Client, *arguments: str) -> Any:
    code, out, err = await run(client, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


async def test_models_hooks_status(client: Client) -> None:
    (card,) = await ask(client, "models")
    assert card["name"] == "smollm2-135m-instruct"
    hooks = await ask(client, "hooks")
    assert len(hooks) == len((await client.card()).hooks)
    (status,) = await ask(client, "status")
    assert len(status["workers"]) == 1 and status["queued"] == 0
    assert status["lanes"]["interactive"] == {"queued": 0, "oldest": 0.0}
    (worker,) = status["workers"]
    assert worker["state"] == "serving" and worker["restarts"] == 0 and worker["tokens_per_s"] >= 0
    for command in ("models", "hooks", "status"):
        code, out, _ = await run(client, command)
        assert code == 0 and out.strip()


async def test_status_is_watched_until_interrupted(client: Client) -> None:
    command = [sys.executable, "-m", "lenspool.cli", "status", "--redis", client.url, "--watch", "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        times = [json.loads(await process.stdout.readline())[0]["workers"][0]["time"] for _ in range(4)]
        process.send_signal(signal.SIGINT)
        assert await process.wait() in (0, 130)
    assert times[-1] > times[0]


async def test_capture_and_generate(client: Client, tmp_path: Path) -> None:
    out = tmp_path / "rows.npz"
    answer = await ask(client, "capture", "Hello world", "resid_post.3", "--positions", "0,-1", "--out", str(out))
    assert answer["hooks"][0]["shape"] == [2, 576]
    expected = await client.capture("Hello world", "resid_post.3", positions=[0, -1])
    assert expected.cached
    assert np.array_equal(np.load(out)["blocks.3.hook_resid_post"], expected["resid_post.3"])
    text = await ask(client, "generate", "Hello", "--max-tokens", "3")
    assert len(text["token_ids"]) == 3
    code, printed, _ = await run(client, "generate", "Hello", "--max-tokens", "30")
    whole = await client.generate("Hello", max_tokens=30)
    assert code == 0 and whole.cached and printed == f"Hello{whole.text}\n"


async def test_errors_are_one_line_and_a_status(client: Client) -> None:
    code, out, err = await run(client, "capture", "Hello", "resid_post.99")
    assert code == 1 and not out
    assert err.startswith("lenspool: hooks:") and len(err.strip().splitlines()) == 1
