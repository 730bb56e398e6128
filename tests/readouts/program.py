"""Asks tiny models for readouts and for the whole captures that they are made of, and writes both beside transformers'.

A program of its own, because vLLM then runs in this process (`tests.families.inprocess`) and changes it for good::

    python -m tests.readouts.program out.pickle
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import redis.asyncio
import torch

from lenspool import readouts as ro
from lenspool.access import RedisAccess, StoreAccess
from lenspool.answer import result_of
from lenspool.card import ModelCard
from lenspool.generation import Generation
from lenspool.interventions import add
from lenspool.job import Request, job_id, prepare
from lenspool.result import Capture
from lenspool.sampling import sampling_document
from lenspool_cache import Store
from tests.families.checkpoints import VOCABULARY, WIDTH, make
from tests.families.inprocess import in_process

MODELS = ("Llama", "Gemma-2", "GPT-2")
"""An untied head; soft-capped logits and norms that multiply by 1 + weight; LayerNorm and a tied head."""

PROMPT = [int(t) for t in np.random.default_rng(5).integers(3, VOCABULARY, 21)]
IDS = [7, 0, VOCABULARY - 1]
FEATURES = 300
_random = np.random.default_rng(6)
MATRIX = _random.standard_normal((WIDTH, 4)).astype(np.float32)
SAE = {
    "W_enc": _random.standard_normal((WIDTH, FEATURES)).astype(np.float32),
    "b_enc": _random.standard_normal(FEATURES).astype(np.float32),
    "b_dec": _random.standard_normal(WIDTH).astype(np.float32),
}
THRESHOLD = np.abs(_random.standard_normal(FEATURES) * 20).astype(np.float32)
STEER = (_random.standard_normal(WIDTH) * 3).astype(np.float32)
STREAM, HEADS = "blocks.1.hook_resid_post", "blocks.1.attn.hook_z"
READOUTS: dict[str, ro.Readout] = {
    "top_k": ro.top_k("logits", 5),
    "logprobs": ro.logprobs(IDS),
    "logits_of": ro.logits_of(IDS),
    "rank": ro.rank(IDS),
    "entropy": ro.entropy(),
    "loss": ro.loss(),
    "top_k of features": ro.top_k("blocks.2.mlp.hook_post", 3),
    "norm": ro.norm(STREAM),
    "norm of logits": ro.norm("logits"),
    "norm per head": ro.norm(HEADS),
    "project": ro.project(STREAM, MATRIX),
    "project on a vector": ro.project(STREAM, MATRIX[:, 0]),
    "relu": ro.sae(STREAM, **SAE, k=FEATURES),
    "relu, few": ro.sae(STREAM, SAE["W_enc"], SAE["b_enc"], k=6),
    "topk": ro.sae(STREAM, **SAE, activation="topk", k=6),
    "jumprelu": ro.sae(STREAM, **SAE, threshold=THRESHOLD, activation="jumprelu", k=FEATURES),
    "mean": ro.reduce(STREAM, "mean"),
    "max": ro.reduce(STREAM, "max"),
    "mean per head": ro.reduce(HEADS, "mean"),
    "max of logits": ro.reduce("logits", "max"),
    "mean of heads' results": ro.reduce("blocks.0.attn.hook_result", "mean"),
}
LENS: dict[str, ro.Readout] = {
    f"{what} of {hook}": ro.lens(hook, of)
    for hook in ("hook_embed", "blocks.0.hook_resid_mid", "blocks.0.hook_resid_post", "blocks.2.hook_resid_post")
    for what, of in {
        "top_k": ro.top_k(k=5),
        "logprobs": ro.logprobs(IDS),
        "logits_of": ro.logits_of(IDS),
        "rank": ro.rank(IDS),
        "entropy": ro.entropy(),
    }.items()
}
WHOLE = [
    "logits",
    STREAM,
    HEADS,
    "blocks.2.mlp.hook_post",
    "blocks.0.attn.hook_result",
    *dict.fromkeys(r.hook for r in LENS.values()),
]
_OPTIONS = {
    "max_model_len": 128,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_batched_tokens": 16,  # the prompt runs in chunks
    "max_num_seqs": 16,
    "distributed_executor_backend": "uni",
}


class Pool:
    """A client's and a worker's parts of the way, without the queue between them."""

    def __init__(self, engine: Any, store: Store) -> None:
        from lenspool_worker.jobs import JobRunner
        from lenspool_worker.model_card import make_card
        from lenspool_worker.room import Room
        from lenspool_worker.token_streams import TokenStreams

        self.store = store
        self.card: ModelCard = make_card(
            engine, name="tiny", fingerprint="0" * 64, tokenizer=None, store=store, worker="here"
        )
        # no server: arrays are in the store, where both sides find them
        nowhere = redis.asyncio.Redis(port=1)
        self.runner = JobRunner(engine, store, self.card, nowhere, TokenStreams(nowhere, self.card.id), Room(2**30))
        self.access = StoreAccess(store, RedisAccess.__new__(RedisAccess))

    async def ask(self, hooks: Any, prompt: list[int] = PROMPT, **options: Any) -> Any:
        request = prepare(self.card, None, prompt, hooks, **options)
        found = await self.access.find(request, ran=False)
        job: dict[str, Any] = {}
        if not found.complete:
            job = await self.run(request, request.document(found.missing))
            found = await self.access.find(request, ran=True)
        assert found.complete, found.missing
        return result_of(request, Generation if request.sampling else Capture, found, None, job, 0.0)

    async def run(self, request: Request, document: dict[str, Any]) -> dict[str, Any]:
        for digest, array in request.arrays.items():
            await self.access.put_array(digest, array)
        return await self.runner(document, job_id(document))


async def answers(pool: Pool, model: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    stats = await pool.runner._engine.stats()
    result = await pool.ask([*READOUTS.values(), *LENS.values()])
    out["readouts"] = {name: plain(result[readout]) for name, readout in {**READOUTS, **LENS}.items()}
    out["computed"] = result.provenance["computed_rows"]
    out["bytes"] = (await pool.runner._engine.stats())["bytes_written"] - stats["bytes_written"]
    whole = await pool.ask(WHOLE)
    out["whole"] = {name: np.array(whole[name]) for name in whole}
    again = await pool.ask([*READOUTS.values(), *LENS.values(), STREAM])
    out["again"] = (again.cached, plain(again[READOUTS["topk"]]), again.provenance["reused_rows"])

    # a part is there already
    prompt = PROMPT[::-1]
    few, all_ = ro.top_k("logits", 3), ro.lens("resid_post.*", k=2)
    first = await pool.ask([few, all_], prompt, positions=[2, 3, 15])
    rest = await pool.ask([few, all_], prompt)
    out["reuse"] = (first.provenance["computed_rows"], rest.provenance["computed_rows"], rest.provenance["reused_rows"])
    out["reused"] = [plain(r[key]) for r in (first, rest) for key in (few, f"{STREAM}|lens.top_k(2)")]

    # an edited run
    edit = add(STREAM, STEER, positions=[4, 5, 6])
    edited = await pool.ask([ro.lens(STREAM, ro.logits_of(IDS)), ro.norm(STREAM), STREAM], interventions=edit)
    out["edited"] = [plain(edited[key]) for key in (ro.lens(STREAM, ro.logits_of(IDS)), ro.norm(STREAM), STREAM)]
    out["edited, transformers"] = read_stream(model, edited[STREAM])

    # a generation
    sampling = sampling_document(max_tokens=4, ignore_eos=True)
    asked = [ro.top_k("logits", 1), ro.loss(), ro.reduce(STREAM, "mean"), STREAM, ro.lens(STREAM, k=1)]
    made = await pool.ask(asked, sampling=sampling)
    out["generated"] = (made.token_ids, [plain(made[key]) for key in asked])
    later = await pool.ask([ro.entropy(), "logits", ro.reduce(STREAM, "max")], sampling=sampling, positions="generated")
    out["later"] = (plain(later[ro.entropy()]), np.array(later["logits"]), plain(later[ro.reduce(STREAM, "max")]))
    one = sampling_document(max_tokens=1, ignore_eos=True)
    empty = [ro.top_k("logits", 3), ro.entropy(), ro.reduce(STREAM, "mean")]
    nothing = await pool.ask(empty, sampling=one, positions="generated")
    out["nothing"] = [plain(nothing[key]) for key in empty]
    out["refusals"] = await refusals(pool)
    out["held"] = (await pool.runner._engine.stats())["held_bytes"]
    return out


async def refusals(pool: Pool) -> dict[str, str]:
    """What the worker says to documents that no client of ours would write."""
    request = prepare(pool.card, None, PROMPT[:5], [ro.norm(STREAM)])
    document = request.document({name: request.ranges_of(name) for name in request.hooks})
    digest = pool.store.put_array(MATRIX[:5])
    other = f'{STREAM}|project("{digest}",4)'
    documents = {
        "shape": {**document, "captures": [{"hooks": [other], "ranges": [[0, 5]]}]},
    }
    out = {}
    for name, wrong in documents.items():
        try:
            await pool.runner(wrong, job_id(wrong))
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


def plain(value: Any) -> Any:
    """A readout as arrays."""
    return np.array(value) if isinstance(value, np.ndarray) else {k: np.array(v) for k, v in vars(value).items()}


@torch.no_grad()
def transformers_says(model: Any, tokens: list[int]) -> dict[str, np.ndarray]:
    """Logits of the model, and those of its streams through its own norm and head."""
    core = model.model if hasattr(model, "model") else model.transformer
    layers = core.layers if hasattr(core, "layers") else core.h
    streams: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, _args: Any, out: Any) -> None:
            streams[name] = out[0] if isinstance(out, tuple) else out

        return hook

    handles = [layer.register_forward_hook(keep(f"blocks.{i}.hook_resid_post")) for i, layer in enumerate(layers)]
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    out = {name: read_stream(model, stream.reshape(len(tokens), -1).numpy()) for name, stream in streams.items()}
    return {"logits": logits.numpy(), **out}


@torch.no_grad()
def read_stream(model: Any, rows: np.ndarray) -> np.ndarray:
    """Final norm and unembedding by transformers' modules."""
    core = model.model if hasattr(model, "model") else model.transformer
    norm = core.norm if hasattr(core, "norm") else core.ln_f
    logits = model.lm_head(norm(torch.from_numpy(rows.astype(np.float32))))
    cap = getattr(model.config, "final_logit_softcapping", None)
    return (cap * torch.tanh(logits / cap) if cap else logits).numpy()


async def main(target: Path) -> None:
    from lenspool_worker.engine import Engine

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {name: make(name, Path(folder) / name) for name in MODELS}
        says = {name: transformers_says(model, PROMPT) for name, model in models.items()}  # before vLLM
        for name, model in models.items():
            with in_process():
                store = Store(Path(folder) / f"{name} store")
                engine = Engine(str(Path(folder) / name), store, _OPTIONS)
                await engine.start()
                found[name] = await answers(Pool(engine, store), model)
                found[name]["transformers"] = says[name]
                await engine.stop()
    target.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    asyncio.run(main(Path(sys.argv[1])))
