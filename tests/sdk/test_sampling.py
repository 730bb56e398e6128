"""Sampling arguments: one canonical form, refusals that name the argument, and limits of the model."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from tests.sdk.conftest import VOCAB

from lenspool.card import ModelCard
from lenspool.checks import check
from lenspool.errors import InvalidJob
from lenspool.job import Request, prepare
from lenspool.sampling import MAX_LOGPROBS, Sampling, check_sampling, sampling_document

EVERYTHING: dict[str, Any] = {
    "max_tokens": 8,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "seed": 3,
    "stop": ["b", "a"],
    "stop_token_ids": [9, 4],
    "ignore_eos": True,
    "frequency_penalty": 0.25,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.25,
    "logit_bias": {5: -100, 2: 1.5},
    "json_schema": {"type": "object"},
    "logprobs": 5,
    "prompt_logprobs": 0,
}
"""A value other than the default for each argument."""


def request(card: ModelCard, tokens: list[int], **sampling: Any) -> Request:
    return prepare(card, None, tokens, (), sampling=sampling_document(**sampling))


def test_every_argument_has_its_example() -> None:
    assert set(EVERYTHING) == set(Sampling.__annotations__)


def test_canonical_form_is_stable_and_survives_json() -> None:
    made = sampling_document(**EVERYTHING)
    again = json.loads(json.dumps(made))
    assert again == made and sampling_document(**again) == made
    assert made["stop"] == ["a", "b"] and made["stop_token_ids"] == [4, 9]
    assert made["logit_bias"] == [[2, 1.5], [5, -100.0]]


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_argument_is_part_of_the_identity(card: ModelCard, name: str) -> None:
    """With one argument left out, it is another run and another job."""
    less = {n: v for n, v in EVERYTHING.items() if n not in (name, "stop")}
    more = {**less, name: EVERYTHING[name]} if name != "stop" else {**less, "seed": 4}
    one, two = (
        dataclasses.replace(request(card, [1, 2]), sampling=sampling_document(**args), nonce=None)
        for args in (less, more)
    )
    assert one.run.document != two.run.document and one.document({}) != two.document({})


def test_spellings_of_the_same_are_the_same() -> None:
    plain = sampling_document()
    assert (
        sampling_document(
            min_tokens=0,
            min_p=0,
            stop_token_ids=[],
            frequency_penalty=-0.0,
            presence_penalty=0,
            repetition_penalty=1,
            logit_bias={7: 0},
            logprobs=None,
            prompt_logprobs=None,
        )
        == plain
    )
    assert list(plain) == ["max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos"]
    greedy = {"top_p": 0.5, "top_k": 3, "min_p": 0.2, "seed": 7}
    assert sampling_document(**greedy) == plain, "greedy sampling does not use them"  # type: ignore[typeddict-item]
    assert sampling_document(logit_bias={np.int64(3): np.float32(0.5)}) == sampling_document(logit_bias=[(3, 0.5)])
    assert sampling_document(stop="x") == sampling_document(stop=["x", "x"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("min_tokens", 17),
        ("temperature", 2.5),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("seed", -1),
        ("stop", ""),
        ("stop", 5),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [-1]),
        ("ignore_eos", 1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("logit_bias", {1: 101}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", [(1, 1.0), (1, 2.0)]),
        ("logit_bias", 3),
        ("logit_bias", [1, 2]),
        ("json_schema", {}),
        ("json_schema", "object"),
        ("json_schema", {"enum": [math.nan]}),
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", 1.5),
    ],
)
def test_refusals_name_the_argument(name: str, value: Any) -> None:
    with pytest.raises(InvalidJob) as caught:
        sampling_document(**{name: value})
    assert caught.value.field == name


def test_unknown_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="best_of"):
        sampling_document(best_of=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stop_token_ids": [VOCAB]}, "outside the vocabulary"),
        ({"logit_bias": {VOCAB: 1.0}}, "outside the vocabulary"),
        ({"logprobs": 21}, "max_logprobs"),
        ({"prompt_logprobs": 21}, "max_logprobs"),
    ],
)
def test_limits_of_the_model_hold_in_client_and_worker(card: ModelCard, arguments: Any, words: str) -> None:
    (name,) = arguments
    with pytest.raises(InvalidJob, match=words) as caught:
        request(card, [1, 2, 3], **arguments)
    assert caught.value.field == name
    forged = {**request(card, [1, 2, 3]).document({}), "sampling": sampling_document(**arguments)}
    with pytest.raises(InvalidJob, match=words):
        check(forged, card)
    with pytest.raises(InvalidJob, match="canonical"):
        check({**forged, "sampling": {**sampling_document(), "min_p": 0.0}}, card)


def test_log_probabilities_are_bounded_in_bytes(card: ModelCard) -> None:
    large = dataclasses.replace(card, vocab_size=150_000, max_logprobs=1000, max_batched_tokens=8192)
    check_sampling(sampling_document(prompt_logprobs=1), 1700, large)
    with pytest.raises(InvalidJob, match="max_num_batched_tokens"):
        check_sampling(sampling_document(prompt_logprobs=1), 2000, large)
    check_sampling(sampling_document(prompt_logprobs=1), 2000, dataclasses.replace(large, max_batched_tokens=1024))
    with pytest.raises(InvalidJob, match=str(MAX_LOGPROBS)):
        check_sampling(sampling_document(max_tokens=5000, logprobs=1000), 1, large)


def test_samples_of_one_prompt_are_jobs_of_their_own(card: ModelCard) -> None:
    seeded = request(card, [1, 2], temperature=1.0, seed=5)
    alone = request(card, [1, 2], temperature=1.0, seed=6)
    assert seeded.resampled(6).run.document == alone.run.document
    free = request(card, [1, 2], temperature=1.0)
    assert len({str(r.document({})) for r in (free, free.resampled(None), free.resampled(None))}) == 3
