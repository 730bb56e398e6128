"""Readouts in requests: canonical names, and what is refused before anything is queued."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lenspool import ArrayRef, InvalidJob, ModelCard, UnknownHook, UnsupportedHook
from lenspool import readouts as ro
from lenspool.card import HookInfo
from lenspool.checks import check
from lenspool.entries import parse
from lenspool.job import Request, prepare
from lenspool.sampling import sampling_document
from tests.sdk.conftest import LAYERS, VOCAB, WIDTH

TOKENS = list(range(10))
STREAM = "blocks.1.hook_resid_post"
SAE: dict[str, Any] = {"W_enc": np.ones((WIDTH, 40)), "b_enc": np.zeros(40)}


def ask(card: ModelCard, hooks: Any, **options: Any) -> Request:
    return prepare(card, None, options.pop("prompt", TOKENS), hooks, **options)


def document(request: Request) -> dict[str, Any]:
    wanted = {name: request.ranges_of(name) for name in request.hooks}
    made: dict[str, Any] = json.loads(json.dumps(request.document(wanted)))
    return made


EVERY = [
    ro.top_k("logits", 10),
    ro.top_k("resid_post.0", 3),
    ro.logprobs([1, 2]),
    ro.logits_of(np.array([1, 2])),
    ro.rank((5,)),
    ro.entropy(),
    ro.loss(),
    ro.lens("resid_post.*", k=5),
    ro.lens("hook_embed", ro.entropy()),
    ro.norm("mlp_out.*"),
    ro.project("resid_mid.2", np.ones((WIDTH, 3))),
    ro.sae(STREAM, **SAE),
    ro.sae(STREAM, **SAE, b_dec=np.zeros(WIDTH), threshold=np.ones(40), activation="jumprelu", k=4),
    ro.reduce("resid_pre.3", "mean"),
]


def test_what_the_client_writes_the_worker_accepts(card: ModelCard) -> None:
    for positions in ("all", [0, 4], slice(2, 7)):
        check(document(ask(card, ["resid_post.1", *EVERY], positions=positions)), card)
    sampling = sampling_document(max_tokens=4)
    check(document(ask(card, EVERY, sampling=sampling)), card)
    generated = [readout for readout in EVERY if readout.op != "loss"]
    check(document(ask(card, generated, sampling=sampling, positions="generated")), card)


def test_names_are_canonical_whatever_is_written(card: ModelCard) -> None:
    assert ask(card, ro.top_k("logits", np.int64(10))).hooks == [
        "unembed.hook_out|top_k(10).indices",
        "unembed.hook_out|top_k(10).values",
    ]
    assert ask(card, "logits|top_k(10)").hooks == ask(card, ro.top_k("unembed.hook_out", 10)).hooks
    assert ask(card, ["resid_post.-1|norm()"]).hooks == [f"blocks.{LAYERS - 1}.hook_resid_post|norm()"]
    assert ask(card, ro.reduce("resid_post.1", "mean"), positions=[0, 1, 4]).hooks == [f"{STREAM}|mean([[0,2],[4,5]])"]
    assert ask(card, f"{STREAM}|mean()").hooks == [f"{STREAM}|mean([[0,10]])"]
    lens = ask(card, [ro.lens("resid_post.*", k=5), "resid_post.1", ro.lens("resid_post.1", ro.top_k(k=5))])
    assert len(lens.hooks) == 1 + 2 * LAYERS and lens.hooks[0] == STREAM
    assert f"{STREAM}|lens.top_k(5).values" in lens.hooks
    backwards = ask(card, EVERY[::-1])
    assert document(backwards) == document(ask(card, EVERY))


def test_arrays_travel_by_content(card: ModelCard) -> None:
    matrix = np.arange(WIDTH * 3.0).reshape(WIDTH, 3)
    request = ask(card, ro.project(STREAM, matrix))
    (digest,) = request.arrays
    assert request.hooks == [f'{STREAM}|project("{digest}",3)']
    assert ask(card, ro.project(STREAM, matrix.astype(np.float32).tolist())).hooks == request.hooks
    by_reference = ask(card, ro.project(STREAM, ArrayRef(digest, (WIDTH, 3))))
    assert by_reference.hooks == request.hooks and not by_reference.arrays
    assert ask(card, ro.project(STREAM, matrix + 1)).hooks != request.hooks


def test_loss_has_no_row_at_the_last_position(card: ModelCard) -> None:
    assert document(ask(card, ro.loss()))["captures"][0]["ranges"] == [[0, 9]]
    sampling = sampling_document(max_tokens=4)
    assert document(ask(card, ro.loss(), sampling=sampling))["captures"][0]["ranges"] == [[0, 9]]
    for options in ({"positions": "last"}, {"positions": "generated", "sampling": sampling}):
        with pytest.raises(InvalidJob, match="next prompt token") as error:
            ask(card, ro.loss(), **options)
        assert error.value.field == "positions"


NAN = np.full((WIDTH, 2), np.nan)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "k beyond the vocabulary": (lambda: ro.top_k("logits", VOCAB + 1), "top_k.k"),
    "k beyond the width": (lambda: ro.top_k("resid_post.1", WIDTH + 1), "top_k.k"),
    "k beyond the vocabulary, lens": (lambda: ro.lens("resid_post.1", k=VOCAB + 1), "top_k.k"),
    "k of zero": (lambda: ro.top_k("logits", 0), "top_k.k"),
    "k true": (lambda: ro.top_k("logits", True), "top_k.k"),
    "k a float": (lambda: ro.top_k("logits", 3.0), "top_k.k"),  # type: ignore[arg-type]
    "id out of the vocabulary": (lambda: ro.logprobs([1, VOCAB]), "logprobs.token_ids"),
    "negative id": (lambda: ro.rank([-1]), "rank.token_ids"),
    "no ids": (lambda: ro.logits_of([]), "logits_of.token_ids"),
    "ids as text": (lambda: ro.logits_of("ab"), "logits_of.token_ids"),  # type: ignore[arg-type]
    "too many ids": (lambda: ro.logits_of([1] * 1025), "logits_of.token_ids"),
    "logprobs of a stream": (lambda: ro.logprobs([1], "resid_post.1"), "logprobs"),
    "lens of an output": (lambda: ro.lens("mlp_out.1", k=2), "lens"),
    "lens of logits": (lambda: ro.lens("logits", k=2), "lens"),
    "lens without a readout": (lambda: ro.lens("resid_post.1"), "lens"),
    "lens with two": (lambda: ro.lens("resid_post.1", ro.entropy(), k=3), "lens"),
    "lens of a norm": (lambda: ro.lens("resid_post.1", ro.norm("logits")), "lens"),
    "lens of a loss": (lambda: ro.lens("resid_post.1", ro.loss()), "lens"),
    "matrix of another width": (lambda: ro.project("resid_post.1", np.ones((WIDTH + 1, 2))), "project.matrix"),
    "matrix of three dimensions": (lambda: ro.project("resid_post.1", np.ones((2, 2, 2))), "project.matrix"),
    "matrix with NaN": (lambda: ro.project("resid_post.1", NAN), "project.matrix"),
    "matrix of words": (lambda: ro.project("resid_post.1", [["a"]]), "project.matrix"),
    "a reference of another shape": (
        lambda: ro.project("resid_post.1", ArrayRef("0" * 64, (2, 2))),
        "project.matrix",
    ),
    "encoder of another width": (lambda: ro.sae(STREAM, np.ones((3, 40)), SAE["b_enc"]), "sae.W_enc"),
    "encoder with NaN": (lambda: ro.sae(STREAM, np.full((WIDTH, 40), np.inf), SAE["b_enc"]), "sae.W_enc"),
    "bias of another width": (lambda: ro.sae(STREAM, SAE["W_enc"], np.ones(39)), "sae.b_enc"),
    "decoder's bias of another width": (lambda: ro.sae(STREAM, **SAE, b_dec=np.ones(40)), "sae.b_dec"),
    "jumprelu without threshold": (lambda: ro.sae(STREAM, **SAE, activation="jumprelu"), "sae.threshold"),
    "relu with threshold": (lambda: ro.sae(STREAM, **SAE, threshold=np.ones(40)), "sae.threshold"),
    "unknown activation": (lambda: ro.sae(STREAM, **SAE, activation="gelu"), "sae.activation"),
    "topk without k": (lambda: ro.sae(STREAM, **SAE, activation="topk"), "sae.k"),
    "more than all features": (lambda: ro.sae(STREAM, **SAE, k=41), "sae.k"),
    "unknown reduction": (lambda: ro.reduce("resid_post.1", "median"), "reduce"),
    "unknown op": (lambda: "resid_post.1|exec(1)", "hooks"),
    "part of a readout": (lambda: "logits|top_k(3).values", "hooks"),
    "argument too many": (lambda: "logits|entropy(3)", "entropy"),
    "no JSON": (lambda: "logits|top_k(__import__)", "hooks"),
    "not canonical": (lambda: "logits|top_k( 3)", "hooks"),
    "ranges out of the prompt": (lambda: "resid_post.1|mean([[0,11]])", "mean.ranges"),
    "ranges not sorted": (lambda: "resid_post.1|mean([[4,5],[0,2]])", "mean.ranges"),
    "ranges of another form": (lambda: "resid_post.1|mean([3])", "mean.ranges"),
    "no digest": (lambda: 'resid_post.1|project("../x",3)', "project.matrix"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_with_their_name(card: ModelCard, name: str) -> None:
    make, field = WRONG[name]
    with pytest.raises(InvalidJob) as error:
        ask(card, [make()])
    assert error.value.field == field


@pytest.mark.parametrize(
    ("names", "ranges", "field"),
    [
        (["unembed.hook_out|top_k(1000).values"], [[0, 10]], "top_k.k"),
        (["unembed.hook_out|top_k(3)"], [[0, 10]], "captures[0].hooks"),
        (["unembed.hook_out|top_k(true).values"], [[0, 10]], "top_k.k"),
        (["unembed.hook_out|top_k(NaN).values"], [[0, 10]], "top_k.k"),
        (["unembed.hook_out|top_k(3).values"] * 2, [[0, 10]], "captures[0].hooks"),
        (["unembed.hook_out|loss()"], [[0, 10]], "captures[0].ranges"),
        ([f"{STREAM}|mean([[0,10]])"], [[0, 10]], "captures[0].ranges"),
        ([f"{STREAM}|mean([[0,null]])"], [[0, 1]], "mean.ranges"),
        ([f"{STREAM}|os.system(1)"], [[0, 10]], "captures[0].hooks"),
        ([f"{STREAM}|lens.top_k({'[' * 100_000})"], [[0, 10]], "captures[0].hooks"),
        (["blocks.9.hook_resid_post|norm()"], [[0, 10]], "captures[0].hooks"),
        (["x|y|norm()"], [[0, 10]], "captures[0].hooks"),
        ([f'{STREAM}|sae("relu",4,40,null,null,null,null)'], [[0, 10]], "sae.W_enc"),
        ([f'{STREAM}|sae("relu")'], [[0, 10]], "sae"),
    ],
)
def test_the_worker_refuses_them_too(card: ModelCard, names: Any, ranges: Any, field: str) -> None:
    wrong = document(ask(card, "resid_post.1")) | {"captures": [{"hooks": names, "ranges": ranges}]}
    with pytest.raises(InvalidJob) as error:
        check(wrong, card)
    assert error.value.field == field


def test_hooks_that_a_readout_cannot_read(card: ModelCard) -> None:
    with pytest.raises(UnknownHook):
        ask(card, ro.norm("blocks.0.hook_nothing"))
    pattern = HookInfo("blocks.0.attn.hook_pattern", 0, False, ("head", "q_pos", "k_pos"), (2, 0))
    wider = dataclasses.replace(card, hooks={**card.hooks, pattern.name: pattern})
    with pytest.raises(UnsupportedHook, match="as wide as the prompt"):
        ask(wider, ro.norm(pattern.name))
    parallel = {**card.context, "numerics": {"pipeline_parallel": 2}}
    with pytest.raises(UnsupportedHook, match="pipeline"):
        ask(dataclasses.replace(card, context=parallel), ro.lens(STREAM, k=1))
    without = {name: info for name, info in card.hooks.items() if name != "ln_final.hook_out"}
    with pytest.raises(UnsupportedHook, match="norm"):
        ask(dataclasses.replace(card, hooks=without), ro.lens(STREAM, k=1))


def test_bytes_of_a_job_are_bounded(card: ModelCard) -> None:
    logits = dataclasses.replace(card.hooks["unembed.hook_out"], width=150_000)
    large = dataclasses.replace(
        card, hooks={**card.hooks, "unembed.hook_out": logits}, vocab_size=150_000, max_model_len=10_000
    )
    prompt = [1] * 8000
    for hooks in ("logits", ro.reduce("logits", "mean")):
        request = ask(large, hooks, prompt=prompt)
        with pytest.raises(InvalidJob, match="4800000000 of them for") as error:
            document(request)
        assert error.value.field == "hooks"
    document(ask(large, "logits", prompt=prompt, positions=slice(0, 5000)))
    document(ask(large, [ro.top_k("logits", 100), ro.loss()], prompt=prompt))
    wrong = document(ask(large, "resid_post.1", prompt=prompt))
    wrong["captures"][0]["hooks"] = ["unembed.hook_out"]
    with pytest.raises(InvalidJob, match="4800000000 of them"):
        check(wrong, large)


def test_names_are_parsed_back() -> None:
    for name in (f"{STREAM}|lens.logprobs([1,2])", "unembed.hook_out|top_k(3).indices", f"{STREAM}|mean([[0,null]])"):
        assert parse(name).name == name
