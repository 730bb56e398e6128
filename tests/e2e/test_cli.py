"""The commands, against the running pool."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

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
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background jobs ignore
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            times = [json.loads(await process.stdout.readline())[0]["workers"][0]["time"] for _ in range(4)]
            process.send_signal(signal.SIGINT)
            assert await process.wait() in (0, 130)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert times[-1] > times[0]


async def test_capture_and_generate(client: Client, tmp_path: Path) -> None:
    out = tmp_path / "rows.npz"
    answer = await ask(client, "capture", "Hello world", "resid_post.3", "--positions=0,-1", "--out", str(out))
    assert answer["hooks"][0]["shape"] == [2, 576]
    expected = await client.capture("Hello world", "resid_post.3", positions=[0, -1])
    assert expected.cached
    assert np.array_equal(np.load(out)["blocks.3.hook_resid_post"], expected["resid_post.3"])
    text = await ask(client, "generate", "Hello", "--max-tokens", "3")
    assert len(text["token_ids"]) == 3
    code, printed, _ = await run(client, "generate", "Hello", "--max-tokens", "30")
    whole = await client.generate("Hello", max_tokens=30)
    assert code == 0 and whole.cached and printed == f"Hello{whole.text}\n"


async def test_files_of_each_kind_hold_the_rows(client: Client, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="an extra")
    expected = (await client.capture("Hello world", "resid_post.3"))["resid_post.3"]
    name = "blocks.3.hook_resid_post"
    for ending in ("safetensors", "h5"):
        await ask(client, "capture", "Hello world", "resid_post.3", "--out", str(tmp_path / f"rows.{ending}"))
    with safetensors.safe_open(tmp_path / "rows.safetensors", "numpy") as file:
        assert np.array_equal(file.get_tensor(name), expected)
        about = json.loads(file.metadata()["about"])
    with h5py.File(tmp_path / "rows.h5") as file:
        assert np.array_equal(file[name], expected) and json.loads(file.attrs["about"]) == about
    assert about["prompt"] == "Hello world" and about["positions"] == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.h5", "rows.safetensors"]
    code, _, err = await run(client, "capture", "Hello world", "resid_post.3", "--out", str(tmp_path / "rows.txt"))
    assert code == 1 and ".npz, .safetensors, .h5" in err


async def test_a_running_pool_is_well(client: Client) -> None:
    code, out, _ = await run(client, "doctor", "--json")
    found = json.loads(out)
    assert code == 0 and not [f for f in found if f["state"] == "error"], found
    assert any("the one that the workers write to" in f["said"] for f in found)
    code, out, _ = await run(client, "queue")
    assert code == 0


async def test_the_shell_completes_names_from_the_pool(client: Client) -> None:
    async def offered(words: str) -> list[str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from lenspool.cli import app; app(prog_name='lenspool')",
            env={
                **os.environ,
                "LENSPOOL_REDIS": client.url,
                "_LENSPOOL_COMPLETE": "complete_bash",
                "COMP_WORDS": words,
                "COMP_CWORD": str(len(words.split(" ")) - 1),
            },
            stdout=asyncio.subprocess.PIPE,
        )
        return (await process.communicate())[0].decode().split()

    async with asyncio.timeout(60):
        assert await offered("lenspool doc") == ["doctor"]
        assert await offered("lenspool hooks --model smol") == ["smollm2-135m-instruct"]
        hooks = await offered("lenspool capture text blocks.3.hook_resid_p")
        assert hooks == ["blocks.3.hook_resid_post", "blocks.3.hook_resid_pre"]


async def test_the_demo_model_says_where_it_is(smollm2: Path) -> None:
    command = [sys.executable, "-m", "lenspool.cli", "demo-model", "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert process.returncode == 0 and json.loads(out) == {"folder": str(smollm2)}


async def test_errors_are_one_line_and_a_status(client: Client) -> None:
    code, out, err = await run(client, "capture", "Hello", "resid_post.99")
    assert code == 1 and not out
    assert err.startswith("lenspool: hooks:") and len(err.strip().splitlines()) == 1
