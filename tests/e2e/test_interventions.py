"""Interventions from a script: patches from other captures, swapped rows, doses, arrays that travel once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from lenspool import Client, InvalidJob, add, clamp, patch, project_out, scale, set_, steer, swap_rows, zero
from tests.e2e.conftest import counters, relative

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
STORY = "Once upon a time there was a"
Function = Callable[[torch.Tensor], torch.Tensor]


class Model:
    """transformers in float32; an edit is a function of `[tokens, width]` behind a module."""

    def __init__(self, folder: Path) -> None:
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.no_grad()
    def run(self, tokens: list[int], edits: dict[str, Function]) -> tuple[np.ndarray, np.ndarray]:
        """Residual streams `[layers + 1, tokens, width]` and logits, with edits by the name of a module."""
        handles = []
        for name, function in edits.items():

            def hook(_module: Any, _args: Any, out: Any, function: Function = function) -> None:
                tensor = out[0] if isinstance(out, tuple) else out
                rows = tensor[0] if tensor.ndim == 3 else tensor
                rows.copy_(function(rows.clone()))

            handles.append(self.model.get_submodule(name).register_forward_hook(hook))
        try:
            out = self.model(torch.tensor([tokens]), output_hidden_states=True)
        finally:
            for handle in handles:
                handle.remove()
        return torch.stack([h[0] for h in out.hidden_states]).numpy(), out.logits[0].numpy()


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Model:
    return Model(smollm2)


async def test_rows_of_another_run_are_patched_in(client: Client, oracle: Model) -> None:
    clean = await client.capture(CLEAN, ["resid_post.10", "logits"])
    rows = torch.from_numpy(clean["resid_post.10"].copy())
    corrupt = await client.capture(CORRUPT, "logits")
    patched = await client.capture(
        CORRUPT, ["resid_post.20", "logits"], interventions=patch("resid_post.10", clean, positions=[10, -1])
    )

    def function(x: torch.Tensor) -> torch.Tensor:
        x[[10, -1]] = rows[[10, -1]]
        return x

    streams, logits = oracle.run(corrupt.token_ids, {"model.layers.10": function})
    assert relative(patched["resid_post.20"], streams[21]) <= 1e-5
    assert relative(patched["logits"], logits) <= 1e-5
    assert relative(corrupt["logits"], logits) > 1e-3, "it matters"
    reference = await client.put(clean["resid_post.10"])
    item = patch("resid_post.10", reference, positions=[10, -1], source_positions=[10, -1])
    by_hash = await client.capture(CORRUPT, "resid_post.20", interventions=item)
    assert relative(by_hash["resid_post.20"], patched["resid_post.20"]) <= 1e-6


async def test_a_whole_patch_restores_the_clean_run(client: Client) -> None:
    """At the last layer's last position, and at the first layer where the prompts differ."""
    clean, corrupt = (
        await client.capture(CLEAN, ["resid_pre.0", "resid_post.29", "logits"]),
        await client.capture(CORRUPT, "logits"),
    )
    (different,) = [i for i, (a, b) in enumerate(zip(clean.token_ids, corrupt.token_ids, strict=True)) if a != b]
    assert relative(corrupt["logits"][-1], clean["logits"][-1]) > 1e-2
    for item in (patch("resid_post.29", clean, positions=-1), patch("resid_pre.0", clean, positions=different)):
        patched = await client.capture(CORRUPT, "logits", positions="last", interventions=item)
        assert np.abs(patched["logits"][-1] - clean["logits"][-1]).max() <= 1e-4


async def test_rows_change_places(client: Client, oracle: Model) -> None:
    """The rows that are swapped are those that the other interventions have left there."""
    items = [scale("resid_post.4", 1.5, positions=[3]), swap_rows("resid_post.9", 3, -2), zero("mlp_out.12")]
    result = await client.capture(CLEAN, ["resid_post.9", "resid_post.19"], interventions=items)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        x[3] *= 1.5
        return x

    def swapped(x: torch.Tensor) -> torch.Tensor:
        x[[3, -2]] = x[[-2, 3]]
        return x

    edits = {"model.layers.4": scaled, "model.layers.9": swapped, "model.layers.12.mlp": torch.zeros_like}
    streams, _ = oracle.run(result.token_ids, edits)
    assert relative(result["resid_post.9"], streams[10]) <= 1e-5
    assert relative(result["resid_post.19"], streams[20]) <= 1e-5


async def test_heads_are_edited_alone(client: Client, oracle: Model) -> None:
    """Heads zeroed where they are made or in what they add; a captured result shows it."""
    hooks = ["z.6", "result.6", "attn_out.6", "resid_post.12"]
    edited = await client.capture(CLEAN, hooks, interventions=zero("result.6", heads=[2, -1]))
    same = await client.capture(CLEAN, hooks, interventions=zero("z.6", heads=[8, 2]))
    assert all(edited[h].tobytes() == same[h].tobytes() for h in hooks) and same.cached
    assert not edited["z.6"][:, [2, 8]].any() and not edited["result.6"][:, [2, 8]].any()
    plain = await client.capture(CLEAN, hooks)
    assert np.array_equal(edited["z.6"][:, 3], plain["z.6"][:, 3])
    expected = plain["attn_out.6"] - plain["result.6"][:, [2, 8]].sum(1)
    assert relative(edited["attn_out.6"], expected) <= 1e-5


async def test_doses_are_relative_to_the_norm_at_the_hook(client: Client) -> None:
    norms = await client.norms(["resid_post.3", "resid_post.20"])
    sample = await client.capture("A sentence of some words, to see how long rows are.", "resid_post.20")
    typical = np.linalg.norm(sample["resid_post.20"][1:], axis=1).mean()
    assert norms["blocks.20.hook_resid_post"] == pytest.approx(typical, rel=0.3)
    before = await counters(client)
    assert await client.norms("resid_post.3") == {"blocks.3.hook_resid_post": norms["blocks.3.hook_resid_post"]}
    assert (await counters(client))["steps"] == before["steps"], "measured once"
    vector = np.random.default_rng(0).normal(0, 1, 576)
    item = add("resid_post.20", vector, relative=0.5, positions=[4])
    moved = await client.capture(CLEAN, "resid_post.20", interventions=item)
    plain = await client.capture(CLEAN, "resid_post.20")
    step = np.linalg.norm(moved["resid_post.20"] - plain["resid_post.20"], axis=1)
    assert step[4] == pytest.approx(0.5 * norms["blocks.20.hook_resid_post"], rel=1e-4) and not step[:4].any()


async def test_steering_keeps_the_norm_and_projections_remove_it(client: Client) -> None:
    vector, hook = np.random.default_rng(1).normal(0, 1, 576), "resid_post.15"
    unit = vector / np.linalg.norm(vector)
    plain = await client.capture(CLEAN, hook)
    steered = await client.capture(CLEAN, hook, interventions=steer(hook, vector, relative=2.0))
    lengths = [np.linalg.norm(r[hook].astype(np.float64), axis=1) for r in (plain, steered)]
    assert np.allclose(*lengths, rtol=1e-5)
    assert (steered[hook] @ unit)[1:].min() > 0.5 * lengths[0][1:].min()
    removed = await client.capture(CLEAN, hook, interventions=project_out(hook, vector))
    assert np.abs(removed[hook] @ unit).max() <= 1e-4 * lengths[0].max()
    bounded = await client.capture(CLEAN, hook, interventions=clamp(hook, vector, min=-1.0, max=2.0))
    assert np.allclose((bounded[hook] @ unit)[1:], np.clip(plain[hook] @ unit, -1, 2)[1:], atol=1e-3)


async def test_a_generation_is_steered_where_a_token_stands(client: Client) -> None:
    plain = await client.generate(STORY, max_tokens=8, hooks="resid_post.9", ignore_eos=True)
    token = next(t for t in plain.token_ids[:-1] if t not in plain.prompt_token_ids)
    item = set_("resid_post.9", 0.25, where_token=token)
    edited = await client.generate(STORY, max_tokens=8, hooks="resid_post.9", ignore_eos=True, interventions=item)
    ids = [*edited.prompt_token_ids, *edited.token_ids[:-1]]
    assert token in edited.token_ids[:-1]
    for row, at in zip(edited["resid_post.9"], ids, strict=True):
        assert (row == np.float32(0.25)).all() == (at == token)


async def test_an_array_that_nobody_has_fails_by_name(client: Client) -> None:
    reference = await client.put(np.ones(576))
    await client.capture(CLEAN, "resid_post.9", interventions=add("resid_post.3", reference))
    for wrong in (type(reference)("0" * 64, (576,)), type(reference)(reference.digest, (1, 576))):
        with pytest.raises(InvalidJob, match=r"interventions\[0\]"):
            await client.capture(CLEAN, "resid_post.9", interventions=add("resid_post.3", wrong, positions=[0]))
