"""Datasets of the real pool, and other libraries that read them."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lenspool.sync
from lenspool import Client, Dataset
from lenspool.readouts import sae
from tests.e2e.consumers import FEATURES, HOOK

CONSUMERS = Path(sys.prefix) / "share" / "lenspool-consumers"
ROWS = [{"text": f"{n} plus {n} is {2 * n}, and {n} times {n} is {n * n}.", "n": n} for n in range(40)]


def feature_readout() -> Any:
    random = np.random.default_rng(0)
    return sae(HOOK, random.standard_normal((576, FEATURES)) / 24, np.full(FEATURES, -0.5), k=12)


async def feeds(client: Client) -> Dataset:
    return await client.dataset("feeds", ROWS, [HOOK, feature_readout()], context=32, separator="\n", chunk=40)


async def test_a_dataset_of_the_pool(client: Client, store: Path) -> None:
    hooks = [HOOK, "z.3"]
    dataset = await client.dataset("arithmetic", ROWS, hooks, chunk=16, concurrency=8)
    assert len(dataset) == len(ROWS) and not list(dataset.failures())
    for number in (0, 17, 39):
        same = await client.capture(ROWS[number]["text"], hooks)
        assert same.cached and same.token_ids == dataset[number].token_ids
        assert all(same[name].tobytes() == dataset[number][name].tobytes() for name in hooks)

    def twin() -> list[str]:
        with lenspool.sync.Client(client.url, store=store) as other:
            return [
                other.open_dataset("arithmetic").hash,
                other.dataset("arithmetic", iter(ROWS), hooks, chunk=16).hash,
            ]

    assert await asyncio.to_thread(twin) == [dataset.hash, dataset.hash]
    packed = await feeds(client)
    assert {len(packed.token_ids(i)) for i in range(len(packed) - 1)} == {32}


@pytest.mark.skipif(not CONSUMERS.is_dir(), reason="the other libraries are not here: make consumers")
async def test_other_libraries_read_it(client: Client, store: Path, smollm2: Path, tmp_path: Path) -> None:
    dataset = await feeds(client)
    whole = sum(len(dataset.token_ids(i)) == 32 for i in range(len(dataset)))
    arguments = [client.url, str(store), str(tmp_path), "The Eiffel Tower is in the city of Paris", str(smollm2)]
    path = os.pathsep.join([str(CONSUMERS), os.environ.get("PYTHONPATH", "")])
    async with asyncio.timeout(300):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.e2e.consumers", *arguments),
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": path},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
    assert process.returncode == 0, errors.decode()[-4000:]
    answer = json.loads(out.splitlines()[-1])
    trained = answer["sae_lens"]
    assert trained["steps"] == 10 and trained["moved"] > 1e-3 and trained["same"]
    assert trained["counts"]["contexts"] == whole
    assert answer["encoders"].keys() == {"standard", "topk", "jumprelu"}
    assert all(distance < 1e-5 for distance in answer["encoders"].values()), answer["encoders"]
    learned = answer["dictionary_learning"]
    assert len(learned["losses"]) == 10 and np.isfinite(learned["losses"]).all() and max(learned["moved"]) > 1e-4
    assert learned["config"]["d_submodule"] == 576 and learned["config"]["dataset"] == dataset.hash
    delphi = answer["delphi"]
    assert delphi["same"] and delphi["tokens"] and delphi["latents"] > 10 and delphi["records"] > 0
    assert delphi["counts"]["contexts"] == whole


async def test_the_command_builds_what_the_call_builds(client: Client, store: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    options = ["--hook", HOOK, "--hook", "z.3", "--chunk", "16", "--folder", str(tmp_path / "made")]
    async with asyncio.timeout(120):
        command = [sys.executable, "-m", "lenspool.cli", "dataset", "build", "arithmetic", str(tmp_path / "rows.jsonl")]
        process = await asyncio.create_subprocess_exec(
            *command, *options, "--redis", client.url, "--json", stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
    told = json.loads(out)
    expected = await client.dataset("arithmetic", ROWS, [HOOK, "z.3"], chunk=16)
    assert process.returncode == 0 and told["hash"] == expected.hash and told["failures"] == 0
    assert np.array_equal(Dataset(tmp_path / "made").matrix(5, HOOK), expected.matrix(5, HOOK))


def example(name: str) -> Any:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_a_probe_tells_living_things_from_others(client: Client) -> None:
    pytest.importorskip("sklearn", reason="of the examples")
    found = await example("probing").accuracies(client, places=2)
    assert max(found.values()) > 0.9 and found[12] > 0.8, found


async def test_a_sparse_autoencoder_learns_from_the_training_set(client: Client) -> None:
    training = example("sae_training_set")
    dataset = await training.captured(client, [Path(__file__).parents[2] / "README.md"])
    assert {len(dataset.token_ids(i)) for i in range(len(dataset) - 1)} == {training.CONTEXT}
    losses = training.trained(dataset, 40, features=256)
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])


async def test_the_snippets_of_the_docs_run(client: Client) -> None:
    for module in ("datasets", "pyarrow", "zarr", "safetensors"):
        pytest.importorskip(module, reason="an extra")
    text = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == 6
    names: dict[str, Any] = {"client": client}
    for snippet in snippets:
        pending = eval(compile(snippet, "docs/datasets.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.isawaitable(pending):
            await pending
    assert names["mapped"].array.shape[1] == 576
