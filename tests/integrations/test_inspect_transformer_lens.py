"""TransformerLens's own tools on the provider, with a real pool."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    GenerateConfig,
    get_model,
)
from inspect_ai.solver import generate

from lenspool import Client, add
from lenspool.integrations import wire
from tests.e2e import test_snippets as pages
from tests.e2e.conftest import relative
from tests.integrations.inspect_models import HOOK, Reference, adapted, model_of

os.environ.setdefault("INSPECT_DISPLAY", "none")


async def test_transformer_lens_drives_the_provider(
    client: Client, reference: Reference, smollm2: Path, vector: np.ndarray
) -> None:
    """InspectDriver under a RemoteBridge: caches, logits at every position, loss, edits."""
    from transformer_lens.model_bridge import RemoteBridge
    from transformer_lens.model_bridge.sources.inspect.driver import InspectDriver
    from transformer_lens.model_bridge.sources.inspect.profiles import TLBridgeProfile

    adapter, tokenizer = adapted(smollm2, reference.tokenizer)
    model = model_of(client)
    api: Any = model.api
    profile = TLBridgeProfile(
        api.supported_kinds(), api.provides_sequence_logits, supports_attention_mask=api.supports_attention_mask
    )
    ids = reference.chat(("user", "What is the capital of Spain?"))
    attention = [f"blocks.3.attn.hook_{part}" for part in ("out", "z", "pattern")]
    names = [HOOK, *attention, "blocks.3.ln2.hook_in"]
    edit = {"op": "add", "value": torch.from_numpy(vector), "pos": [2, 3]}

    def work() -> tuple[Any, Any, Any, Any]:
        driver = InspectDriver(model, adapter, tokenizer, profile)
        bridge = RemoteBridge(adapter=adapter, tokenizer=tokenizer, driver=driver)
        tokens = torch.tensor([ids])
        logits, cache = bridge.run_with_cache(tokens, names_filter=names)
        edited = bridge.forward(tokens, intervene={HOOK: edit})
        loss = bridge.forward(tokens, return_type="loss")
        bridge.close()
        return logits, cache, edited, loss

    logits, cache, edited, loss = await asyncio.to_thread(work)
    expected, streams = reference.run(ids)
    assert relative(logits[0].numpy(), expected) < 1e-5
    assert float(loss) == pytest.approx(
        float(torch.nn.functional.cross_entropy(torch.from_numpy(expected[:-1]), torch.tensor(ids[1:]))), abs=1e-4
    )
    assert relative(cache[HOOK][0].numpy(), streams[12]) < 1e-5
    assert cache["blocks.3.attn.hook_z"].shape == (1, len(ids), 9, 64)
    assert cache["blocks.3.attn.hook_pattern"].shape == (1, 9, len(ids), len(ids))
    mixed = cache["blocks.3.ln2.hook_in"] - cache["blocks.3.attn.hook_out"]
    assert relative(mixed[0].numpy(), streams[2]) < 1e-5
    same = await client.capture(ids, "logits", interventions=add("resid_post.12", vector, positions=[2, 3]))
    assert relative(edited[0].numpy(), same["logits"]) < 1e-5
    assert relative(edited[0].numpy(), expected) > 1e-2


async def test_the_wire_form_moves_logits_only_when_asked(client: Client) -> None:
    model = model_of(client)

    async def ask(**arguments: Any) -> dict[str, Any]:
        output = await model.generate("", config=GenerateConfig(extra_body={"extra_args": arguments}))
        assert output.metadata is not None and output.usage is not None and output.usage.output_tokens == 1
        return output.metadata

    full = await ask(input_ids=[1, 504, 3575], capture=["0:resid_pre"])
    assert set(full) == {"activations", "tl_logits"} and full["tl_logits"]["shape"] == [3, 49152]
    assert full["activations"]["0:resid_pre"]["dtype"] == "float32"
    rows = wire.decode_array(full["activations"]["0:resid_pre"])
    assert np.array_equal(rows, (await client.capture([1, 504, 3575], "resid_pre.0"))["resid_pre.0"])
    assert set(await ask(input_ids=[1, 504, 3575], capture=[], return_logits=False)) == {"activations"}


async def test_the_page_runs(
    client: Client,
    reference: Reference,
    smollm2: Path,
    vector: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """docs/inspect.md, from top to bottom."""
    from transformer_lens.model_bridge import RemoteBridge
    from transformer_lens.model_bridge.sources.inspect.driver import InspectDriver
    from transformer_lens.model_bridge.sources.inspect.profiles import TLBridgeProfile

    monkeypatch.setenv("LENSPOOL_REDIS", client.url)
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path))
    adapter, tokenizer = adapted(smollm2, reference.tokenizer)
    task = Task(dataset=[Sample(input="Name a city.")], solver=generate(), config=GenerateConfig(max_tokens=4))
    names: dict[str, Any] = {"client": client, "vector": vector, "task": task, "adapter": adapter}
    names |= {"tokenizer": tokenizer, "get_model": get_model, "eval_async": eval_async, "array_ref": wire.array_ref}
    names |= {part.__name__: part for part in (RemoteBridge, InspectDriver, TLBridgeProfile)}
    async with asyncio.timeout(200):
        for snippet in pages.snippets(Path(__file__).parents[2] / "docs" / "inspect.md"):
            await pages.run(snippet, names, "inspect.md")
    assert names["log"].status == "success" and names["turn"]["resid_post.12"].shape[1] == 576
    await asyncio.to_thread(names["bridge"].close)
