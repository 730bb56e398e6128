"""Recipes on the real model, against transformers with module hooks that do the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
import transformers

import lenspool.sync
from lenspool import Client, InvalidJob
from lenspool.recipes import PatchingSweep, causal_trace, head_ablation, kl, logit_diff, patching_sweep, prob
from lenspool.recipes import steering_vector as steering_recipe
from lenspool.staged import SAMPLE
from tests.e2e.conftest import counters, relative

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
METRIC = logit_diff(" Mary", " John")
HOOKS = [*(f"blocks.{layer}.hook_resid_pre" for layer in (0, 6, 12, 18, 24)), "blocks.29.hook_resid_post"]
FACT = "The Eiffel Tower is in the city of"

Edit = Callable[[torch.Tensor], torch.Tensor]


class Oracle:
    """Transformers in float32; edits are functions of `[positions, width]` at a hook."""

    def __init__(self, folder: Path) -> None:
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def logits(self, text: str, *edits: tuple[str, Edit]) -> torch.Tensor:
        """Of the last position."""
        with torch.no_grad(), ExitStack() as stack:
            for name, edit in edits:
                stack.enter_context(self._hooked(name, edit))
            return self.model(torch.tensor([self.ids(text)])).logits[0, -1].double()

    def rows(self, text: str, name: str) -> torch.Tensor:
        kept: list[torch.Tensor] = []

        def keep(rows: torch.Tensor) -> torch.Tensor:
            kept.append(rows.clone())
            return rows

        self.logits(text, (name, keep))
        return kept[0]

    def _hooked(self, name: str, edit: Edit) -> Any:
        def on_output(_module: Any, _args: Any, out: Any) -> Any:
            hidden = out[0] if isinstance(out, tuple) else out
            edited = edit(hidden[0])[None]
            return (edited, *out[1:]) if isinstance(out, tuple) else edited

        inner = self.model.model
        layer, kind = (int(name.split(".")[1]), name.split(".", 2)[2]) if "." in name else (0, "hook_resid_pre")
        if kind == "attn.hook_z":
            module = inner.layers[layer].self_attn.o_proj
            return module.register_forward_pre_hook(lambda _module, args: (edit(args[0][0])[None], *args[1:]))
        if kind == "hook_resid_pre":
            module = inner.embed_tokens if layer == 0 else inner.layers[layer - 1]
        else:
            module = {"hook_resid_post": inner.layers[layer], "hook_mlp_out": inner.layers[layer].mlp}[kind]
        return module.register_forward_hook(on_output)

    def diff(self, logits: torch.Tensor) -> float:
        mary, john = self.ids(" Mary")[0], self.ids(" John")[0]
        return float(logits[mary] - logits[john])

    def probability(self, logits: torch.Tensor, token: str) -> float:
        return float(logits.softmax(-1)[self.ids(token)[0]])


def replaced(rows: torch.Tensor, where: Any) -> Edit:
    """Puts rows of another run at their own positions (and columns)."""

    def edit(own: torch.Tensor) -> torch.Tensor:
        own = own.clone()
        own[where] = rows[where]
        return own

    return edit


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Oracle:
    return Oracle(smollm2)


@pytest_asyncio.fixture(scope="module")
async def sweep(client: Client) -> PatchingSweep:
    return await patching_sweep(client, CLEAN, CORRUPT, HOOKS, metric=METRIC, progress=False)


def changed(oracle: Oracle) -> int:
    """The one position at which the prompts differ."""
    (position,) = np.flatnonzero(np.array(oracle.ids(CLEAN)) != np.array(oracle.ids(CORRUPT)))
    return int(position)


async def test_patching_finds_the_known_places(sweep: PatchingSweep, oracle: Oracle) -> None:
    n, where = len(oracle.ids(CLEAN)), changed(oracle)
    assert sweep.values.shape == sweep.raw.shape == (len(HOOKS), n)
    assert list(sweep.axes) == ["hook", "position"] and sweep.axes["hook"] == HOOKS
    assert sweep.axes["position"][where] == f"{where} ' John' / ' Mary'"
    assert sweep.clean == pytest.approx(oracle.diff(oracle.logits(CLEAN)), rel=1e-4) and sweep.clean > 1
    assert sweep.corrupt == pytest.approx(oracle.diff(oracle.logits(CORRUPT)), rel=1e-4) and sweep.corrupt < -1
    # the last layer's stream at the last position, and the first layer's at the changed token, are all there is
    assert sweep.raw[-1, -1] == pytest.approx(sweep.clean, rel=1e-4)
    assert sweep.raw[0, where] == pytest.approx(sweep.clean, rel=1e-4)
    assert np.abs(sweep.values[-1, :-1]).max() <= 1e-4
    assert np.abs(np.delete(sweep.values[0], where)).max() <= 1e-4
    assert np.abs(sweep.values[:, :where]).max() <= 1e-4
    recovered = (sweep.raw - sweep.corrupt) / (sweep.clean - sweep.corrupt)
    assert np.array_equal(sweep.values, recovered)
    assert "6 hook x 14 position, logit_diff(' Mary', ' John'): clean 6.1" in repr(sweep)


async def test_patched_cells_equal_the_oracle(sweep: PatchingSweep, oracle: Oracle) -> None:
    strong = [(h, p) for h, p in np.argwhere(np.abs(sweep.raw - sweep.corrupt) > 0.1) if 0 < h < len(HOOKS) - 1]
    assert len(strong) >= 5
    for h, p in strong:
        rows = oracle.rows(CLEAN, HOOKS[h])
        expected = oracle.diff(oracle.logits(CORRUPT, (HOOKS[h], replaced(rows, int(p)))))
        assert sweep.raw[h, p] - sweep.corrupt == pytest.approx(expected - sweep.corrupt, rel=1e-3)


async def test_second_call_is_served_from_the_store(client: Client, sweep: PatchingSweep) -> None:
    """Also by the sync client, which is another process's client for all the pool knows."""
    assert sweep.runs == sweep.raw.size + 2
    before = await counters(client)
    again = await patching_sweep(client, CLEAN, CORRUPT, HOOKS, metric=METRIC)

    def elsewhere() -> PatchingSweep:
        with lenspool.sync.Client(client.url) as twin:
            return twin.run(patching_sweep, CLEAN, CORRUPT, HOOKS[:2], "last", metric=METRIC, progress=True)

    other = await asyncio.to_thread(elsewhere)
    assert (await counters(client))["steps"] == before["steps"]
    assert again.computed == other.computed == 0
    assert np.array_equal(again.raw, sweep.raw)
    assert np.array_equal(other.raw, sweep.raw[:2, -1:])


async def test_metrics_computed_by_the_worker_equal_those_of_all_logits(client: Client, oracle: Oracle) -> None:
    p = oracle.logits(CLEAN).log_softmax(-1).numpy()
    mary = oracle.ids(" Mary")[0]

    def log_probabilities(logits: np.ndarray) -> np.ndarray:
        logits = logits.astype(np.float64)
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    def divergence(logits: np.ndarray) -> float:
        return float(np.exp(p) @ (p - log_probabilities(logits)))

    def probability(logits: np.ndarray) -> float:
        return float(np.exp(log_probabilities(logits)[mary]))

    async def sweep(metric: Any) -> PatchingSweep:
        return await patching_sweep(client, CLEAN, CORRUPT, HOOKS[2:4], [changed(oracle), -1], metric=metric)

    divergences, by_hand = await sweep(kl), await sweep(divergence)
    assert divergences.raw == pytest.approx(by_hand.raw, abs=1e-6, rel=1e-4)
    assert abs(divergences.clean) <= 1e-6 and by_hand.raw.max() > 1 and divergences.corrupt > 1
    assert by_hand.metric == "divergence"
    by_id = await sweep(prob(mary))
    assert by_id.raw == pytest.approx((await sweep(probability)).raw, rel=1e-4)
    assert by_id.raw.tobytes() == (await sweep(prob(" Mary"))).raw.tobytes()


async def test_patching_heads_equals_the_oracle(client: Client, oracle: Oracle) -> None:
    layers = [16, 20]
    hooks = [f"blocks.{layer}.attn.hook_z" for layer in layers]
    sweep = await patching_sweep(client, CLEAN, CORRUPT, hooks, metric=METRIC, heads=True)
    assert sweep.raw.shape == (2, 9) and list(sweep.axes) == ["hook", "head"]
    for i, head in [np.unravel_index(np.abs(sweep.values).argmax(), (2, 9)), (0, 0), (1, 8)]:
        part = np.s_[:, head * 64 : (head + 1) * 64]
        expected = oracle.diff(oracle.logits(CORRUPT, (hooks[i], replaced(oracle.rows(CLEAN, hooks[i]), part))))
        assert sweep.raw[i, head] == pytest.approx(expected, abs=1e-4)
    assert np.abs(sweep.values).max() > 0.01


async def test_ablated_heads_equal_the_oracle(client: Client, oracle: Oracle) -> None:
    prompts, metrics = [CLEAN, CORRUPT], [METRIC, logit_diff(" John", " Mary")]
    result = await head_ablation(client, prompts, metrics, [16, -10])
    assert result.values.shape == (2, 9) and result.raw.shape == (2, 2, 9)
    assert result.axes["layer"] == ["16", "20"]
    assert result.values == pytest.approx((result.raw - result.plain[:, None, None]).mean(0))
    strongest = np.unravel_index(np.abs(result.values).argmax(), (2, 9))
    for row, head in [strongest, (0, 3), (1, 8)]:
        zeros = torch.zeros(len(oracle.ids(CLEAN)), 576)
        edit = (f"blocks.{(16, 20)[row]}.attn.hook_z", replaced(zeros, np.s_[:, head * 64 : (head + 1) * 64]))
        expected = [oracle.diff(oracle.logits(CLEAN, edit)), -oracle.diff(oracle.logits(CORRUPT, edit))]
        assert result.raw[:, row, head] == pytest.approx(expected, abs=1e-4)
    assert np.abs(result.values[strongest]) > 0.05


async def test_mean_ablation_takes_the_mean_of_the_prompts(client: Client, oracle: Oracle) -> None:
    short, hook = "Mary and John met. Then John spoke to", "blocks.16.attn.hook_z"
    result = await head_ablation(client, [CLEAN, short], METRIC, 16, how="mean", positions="last")
    mean = torch.cat([oracle.rows(text, hook) for text in (CLEAN, short)]).mean(0)
    for head in (0, 5):
        for i, text in enumerate((CLEAN, short)):
            rows = mean.expand(len(oracle.ids(text)), -1)
            edit = replaced(rows, np.s_[-1, head * 64 : (head + 1) * 64])
            assert result.raw[i, 0, head] == pytest.approx(oracle.diff(oracle.logits(text, (hook, edit))), abs=1e-4)


@pytest.mark.parametrize(("hook", "positions"), [("resid_post.12", "last"), ("blocks.7.attn.hook_z", slice(1, None))])
async def test_steering_vector_equals_numpy(client: Client, hook: str, positions: Any) -> None:
    sets = ["I love this", "What a wonderful, sunny day"], ["I hate this", "What a terrible day", "No, not again"]
    vector = await steering_recipe(client, *sets, hook, positions)
    plain = [
        np.concatenate([(await client.capture(p, hook, positions=positions))[hook] for p in prompts])
        for prompts in sets
    ]
    expected = plain[0].mean(0, dtype=np.float64) - plain[1].mean(0, dtype=np.float64)
    assert relative(vector.vector, expected) <= 1e-5
    assert vector.norm == pytest.approx(np.linalg.norm(expected))
    assert vector.runs == 5 and len(vector.positives) == 2 and len(vector.negatives) == 3
    steered = await client.capture("A plain text", hook, interventions=vector.steer(2.0, norm=None, positions=[1]))
    before = await client.capture("A plain text", hook)
    assert relative(steered[hook][1] - before[hook][1], 2 * vector.vector) <= 1e-4
    assert np.array_equal(steered[hook][2], before[hook][2])
    relative_one = await client.capture("A plain text", hook, interventions=vector.steer(relative=0.5, norm=None))
    size = np.linalg.norm((relative_one[hook] - before[hook])[1])
    assert size == pytest.approx(0.5 * (await client.norms(hook))[vector.hook], rel=1e-3)


async def test_causal_trace_equals_the_oracle(client: Client, oracle: Oracle) -> None:
    hooks = ["blocks.0.hook_resid_pre", "blocks.5.hook_resid_post", "blocks.15.hook_resid_post", HOOKS[-1]]
    trace = await causal_trace(client, FACT, "Eiffel Tower", " Paris", hooks, samples=2, seed=7)
    ids = oracle.ids(FACT)
    subject = trace.subject
    assert oracle.tokenizer.decode([ids[p] for p in subject]) == " Eiffel Tower"
    assert [label.endswith("*") for label in trace.axes["position"]] == [p in subject for p in range(len(ids))]
    table = oracle.model.get_input_embeddings().weight.detach().double()
    sample = table[torch.cat([torch.tensor(oracle.ids(text)) for text in SAMPLE])]
    assert trace.noise == pytest.approx(3 * float(sample.std(correction=0)), rel=1e-5)
    assert trace.clean == pytest.approx(oracle.probability(oracle.logits(FACT), " Paris"), rel=1e-4)
    assert trace.raw.shape == (2, 4, len(ids))
    noise = np.random.default_rng(7).standard_normal((2, len(subject), 576)) * trace.noise
    for s in range(2):
        hidden = ("hook_embed", added(noise[s], subject))
        corrupt = oracle.probability(oracle.logits(FACT, hidden), " Paris")
        assert trace.corrupt[s] == pytest.approx(corrupt, rel=1e-3)
        for h, p in [(1, subject[-1]), (2, len(ids) - 1), (2, subject[-1])]:
            restore = (hooks[h], replaced(oracle.rows(FACT, hooks[h]), p))
            expected = oracle.probability(oracle.logits(FACT, hidden, restore), " Paris")
            assert trace.raw[s, h, p] == pytest.approx(expected, rel=1e-3)
    assert trace.raw[:, -1, -1] == pytest.approx(trace.clean, rel=1e-4)
    assert trace.values == pytest.approx((trace.raw - trace.corrupt[:, None, None]).mean(0))
    assert trace.corrupt.max() < 0.5 * trace.clean
    one = await causal_trace(client, FACT, subject[0], " Paris", hooks[:1], subject[:1], samples=1)
    assert one.raw[0, 0, 0] == pytest.approx(one.clean, rel=1e-4) and one.corrupt[0] < 0.99 * one.clean


def added(noise: np.ndarray, where: list[int]) -> Edit:
    def edit(own: torch.Tensor) -> torch.Tensor:
        own = own.clone()
        own[where] += torch.tensor(noise, dtype=torch.float32)
        return own

    return edit


async def test_trace_restores_a_window(client: Client, oracle: Oracle) -> None:
    hooks = [f"blocks.{layer}.hook_mlp_out" for layer in range(6)]
    trace = await causal_trace(client, FACT, [1, 2], " Paris", hooks, 2, window=4, samples=1, noise=0.3)
    hidden = ("hook_embed", added(np.random.default_rng(0).standard_normal((2, 576)) * 0.3, [1, 2]))
    for centre, together in [(0, (0, 1)), (2, (0, 1, 2, 3)), (5, (3, 4, 5))]:
        restore = [(hooks[i], replaced(oracle.rows(FACT, hooks[i]), 2)) for i in together]
        expected = oracle.probability(oracle.logits(FACT, hidden, *restore), " Paris")
        assert trace.raw[0, centre, 0] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda c: patching_sweep(c, CLEAN, CORRUPT + " a", metric=METRIC), "corrupt"),
        (lambda c: patching_sweep(c, CLEAN, CORRUPT, metric="logit_diff"), "metric"),
        (lambda c: patching_sweep(c, CLEAN, CORRUPT, metric=prob(" Mary and John")), "metric"),
        (lambda c: patching_sweep(c, CLEAN, CORRUPT, metric=prob(10**6)), "metric"),
        (lambda c: patching_sweep(c, CLEAN, CORRUPT, positions=99, metric=METRIC), "positions"),
        (lambda c: patching_sweep(c, CLEAN, CORRUPT, "resid_pre.3", metric=METRIC, heads=True), "hooks"),
        (lambda c: patching_sweep(c, CLEAN, CORRUPT, metric=METRIC, concurrency=0), "concurrency"),
        (lambda c: head_ablation(c, CLEAN, METRIC, [30]), "layers"),
        (lambda c: head_ablation(c, CLEAN, METRIC, []), "layers"),
        (lambda c: head_ablation(c, [CLEAN, CLEAN], [METRIC]), "metric"),
        (lambda c: head_ablation(c, CLEAN, METRIC, how="resample"), "how"),
        (lambda c: steering_recipe(c, "one text", ["b"], "resid_post.3"), "positives"),
        (lambda c: steering_recipe(c, ["a"], [], "resid_post.3"), "negatives"),
        (lambda c: steering_recipe(c, ["a"], ["b"], "resid_post.*"), "hook"),
        (lambda c: causal_trace(c, FACT, "Louvre", " Paris"), "subject"),
        (lambda c: causal_trace(c, [1, 2, 3], "Louvre", " Paris"), "subject"),
        (lambda c: causal_trace(c, FACT, "Eiffel", " Paris", window=0), "window"),
        (lambda c: causal_trace(c, FACT, "Eiffel", " Paris", noise=float("nan")), "noise"),
    ],
)
async def test_wrong_calls_name_their_argument(client: Client, call: Any, field: str) -> None:
    with pytest.raises(InvalidJob) as error:
        await call(client)
    assert error.value.field.startswith(field)


async def test_the_first_error_ends_a_recipe(client: Client) -> None:
    def broken(logits: np.ndarray) -> float:
        raise ZeroDivisionError("a metric of one's own")

    with pytest.raises(ZeroDivisionError, match="of one's own"):
        await patching_sweep(client, CLEAN, CORRUPT, HOOKS[:1], [0, 1, 2], metric=broken, concurrency=2)
    assert len(asyncio.all_tasks()) < 20


async def test_results_draw_pictures(client: Client, sweep: PatchingSweep, tmp_path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    ablation = await head_ablation(client, CLEAN, METRIC, 16)
    vector = await steering_recipe(client, ["I love this"], ["I hate this", "No, not again"], "resid_post.12")
    trace = await causal_trace(client, FACT, "Eiffel", " Paris", HOOKS[:1], "last", samples=1)
    for result in (sweep, ablation, vector, trace):
        file = tmp_path / f"{type(result).__name__}.png"
        axes = result.plot()
        axes.figure.savefig(file)
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000
    axes = sweep.plot()
    assert np.array_equal(axes.images[0].get_array(), sweep.values)
    assert [label.get_text() for label in axes.get_yticklabels()] == HOOKS
