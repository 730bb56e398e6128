"""What the README, the pages, the examples and the notebook show is run, on the session's pool."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import attention_heads, logit_lens, steering_vector, ten_scripts

import lenspool
from lenspool import Client
from lenspool.testing import FakePool
from tests.e2e.conftest import counters

ROOT = Path(__file__).parents[2]
PAGES = ("generation.md", "interventions.md", "readouts.md", "recipes.md", "results.md", "settings.md")
PROMPT = "The Eiffel Tower is in the city of Paris"


@pytest.fixture(autouse=True)
def headless(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    pytest.importorskip("xarray", reason="an extra")
    pytest.importorskip("matplotlib", reason="an extra").use("Agg")
    monkeypatch.setenv("LENSPOOL_REDIS", client.url)


def snippets(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


async def run(code: str, names: dict[str, Any], where: str) -> None:
    pending = eval(compile(code, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.isawaitable(pending):
        await pending


def test_no_page_is_forgotten() -> None:
    """One that is not run here is named by the test that runs it."""
    others = "".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py") if p != Path(__file__))
    pages = [p.name for p in (ROOT / "docs").glob("*.md") if "```python" in p.read_text()]
    assert set(PAGES) <= set(pages)
    assert [page for page in pages if page not in PAGES and page not in others] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "recipes.md"])
async def test_the_pages_run_from_top_to_bottom(client: Client, page: str) -> None:
    names: dict[str, Any] = {"client": client, "prompt": PROMPT, "print": lambda *_, **__: None}
    if page == "interventions.md":
        names["clean"] = await client.capture(PROMPT.replace("Paris", "Rome"), "resid_pre.3")
        names |= {"vector": np.ones(576), "directions": np.eye(576)[:2]}
    async with asyncio.timeout(300):
        for snippet in snippets(ROOT / "docs" / page):
            await run(snippet, names, page)


async def test_the_recipes_page_runs(client: Client) -> None:
    """Thousands of runs, on a pretended pool with the real shapes and tokens; real ones: `test_recipes`."""
    card, desk = await client._connect()
    names: dict[str, Any] = {"client": FakePool(card, desk.tokenizer).client()}
    async with asyncio.timeout(300):
        for snippet in snippets(ROOT / "docs" / "recipes.md"):
            await run(snippet, names, "recipes.md")
    assert np.isfinite(names["sweep"].raw).all() and np.isfinite(names["trace"].values).all()


async def test_the_readme_runs(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script: where it starts a pool of its own, it gets a client of the session's."""

    @contextlib.asynccontextmanager
    async def running(model: str) -> AsyncIterator[Client]:
        async with Client(client.url) as connected:
            yield connected

    monkeypatch.setattr(lenspool, "connect_local", running)
    names: dict[str, Any] = {"__name__": "__main__"}
    found = snippets(ROOT / "README.md")
    assert len(found) == 2 and len([line for line in found[0].splitlines() if line]) == 3
    async with asyncio.timeout(300):
        for snippet in found:
            await asyncio.to_thread(exec, compile(snippet, "README.md", "exec"), names)
    await asyncio.to_thread(names["client"].close)


async def test_the_examples_find_what_they_look_for(client: Client, tmp_path: Path) -> None:
    async with asyncio.timeout(300):
        ranks = await logit_lens.explore(client, tmp_path / "lens.png")
        assert ranks[-1] < 5 < ranks[0]
        scores = await attention_heads.explore(client, 16, tmp_path / "heads.png")
        # chance is 1 in 32 keys at most positions
        assert scores["previous token"].max() > 0.5 and scores["induction"].max() > 0.3
        found = await steering_vector.explore(client, max_tokens=4)
        assert found["smallest gap"] > 0
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("lens.png", "heads.png"))


async def test_scripts_at_once_share_what_they_ask_for(client: Client) -> None:
    """The engine runs no more tokens than the distinct prompts have."""
    own = [f"Script {number} asks about the year {1900 + 10 * i}" for number in range(3) for i in range(6)]
    distinct = sum([len(await client.tokens(text)) for text in [*ten_scripts.SHARED, *own]])
    async with asyncio.timeout(300):
        before = (await counters(client))["tokens"]
        counts = await asyncio.to_thread(ten_scripts.run, client.url, 3)
        ran = (await counters(client))["tokens"] - before
    assert [count["answers"] for count in counts] == [12] * 3 and 0 < ran <= distinct
    again = await asyncio.to_thread(ten_scripts.script, client.url, 0)
    assert again == {"answers": 12, "computed": 0, "reused": 12}


async def test_the_notebook_runs(client: Client, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="a development dependency")
    nbclient = pytest.importorskip("nbclient", reason="a development dependency")
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    runner = nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})
    async with asyncio.timeout(300):
        await runner.async_execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    kinds = [kind for output in outputs for kind in output.get("data", ())]
    assert kinds.count("image/png") == 4
    shown = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", ())]
    assert any("<progress max=20 value=20>" in text for text in shown)  # the bar, at its end
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)
    if folder := os.environ.get("LENSPOOL_KEEP_NOTEBOOK"):  # to be looked at
        nbformat.write(notebook, Path(folder) / "tour.ipynb")
