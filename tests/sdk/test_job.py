"""A call is checked before anything is queued, and its key is made of everything that can change the answer."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from lenspool import InvalidJob, LenspoolError, ModelCard, UnknownHook, UnsupportedHook, add, entries, zero
from lenspool.checks import check
from lenspool.errors import from_wire, to_wire
from lenspool.job import GENERATION, job_id, prepare, run_of
from lenspool.sampling import sampling_document
from lenspool.vocabulary import HOOK_POINTS
from lenspool_cache.prefix import reach

TOKENS = list(range(10))
HOOKS = ["resid_post.1", "logits"]


def request(card: ModelCard, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"prompt": TOKENS, "hooks": HOOKS} | changes
    return prepare(card, None, **arguments)


def document(card: ModelCard, **changes: Any) -> dict[str, Any]:
    made = request(card, **changes)
    return json.loads(json.dumps(made.document(dict.fromkeys(made.hooks, made.ranges))))


def test_what_the_client_writes_the_worker_accepts(card: ModelCard) -> None:
    check(document(card), card)
    check(document(card, positions=[0, 5, -1], interventions=[add("resid_mid.0", np.ones(16), positions=2)]), card)
    sampling = sampling_document(max_tokens=4, temperature=0.7, seed=3, stop=["b", "a"])
    generation = document(
        card, sampling=sampling, positions="generated", interventions=[zero("attn_out.*", phase="generated")]
    )
    check(generation, card)
    assert (
        run_of(generation, card.context).key
        == request(card, sampling=sampling, interventions=[zero("attn_out.*", phase="generated")]).run.key
    )


def test_key_changes_with_everything_that_can_change_the_answer(card: ModelCard) -> None:
    def changed(path: tuple[str, ...], value: Any) -> ModelCard:
        context = json.loads(json.dumps(card.context))
        place = context
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value
        return dataclasses.replace(card, context=context)

    greedy = sampling_document(max_tokens=4)
    requests = [
        request(card),
        request(card, prompt=TOKENS[:-1]),
        request(card, prompt=[*TOKENS[:-1], 50]),
        request(card, interventions=zero("resid_mid.1")),
        request(card, reuse="none"),
        request(card, interventions=zero("resid_mid.1", positions=0)),
        request(card, interventions=add("resid_mid.1", 1.0)),
        request(card, sampling=greedy),
        request(card, sampling=sampling_document(max_tokens=5)),
        request(card, sampling=sampling_document(max_tokens=4, temperature=1.0, seed=0)),
        request(card, sampling=sampling_document(max_tokens=4, temperature=1.0, seed=1)),
        request(card, sampling=sampling_document(max_tokens=4, stop="x")),
        request(changed(("model",), "1" * 64)),
        request(changed(("numerics", "dtype"), "bfloat16")),
        request(changed(("numerics", "vllm"), "0.33")),
        request(changed(("vocabulary",), 2)),
    ]
    keys = {r.run.key for r in requests}
    assert len(keys) == len(requests)


def test_key_ignores_what_cannot_change_the_answer(card: ModelCard) -> None:
    renamed = dataclasses.replace(card, name="other", id="other@1", worker="w9", store_path="/elsewhere")
    assert request(card).run.key == request(renamed, hooks="embed", positions="last").run.key
    one, two = (sampling_document(max_tokens=4, seed=s, top_p=p) for s, p in ((1, 0.5), (2, 0.9)))
    assert one == two, "a greedy generation does not depend on seed or top_p"


def test_sampling_without_a_seed_is_never_reused(card: ModelCard) -> None:
    sampling = sampling_document(max_tokens=4, temperature=1.0)
    assert request(card, sampling=sampling).run.key != request(card, sampling=sampling).run.key


def test_a_run_that_takes_no_rows_of_others_is_another_one(card: ModelCard) -> None:
    plain, alone = request(card), request(card, reuse="none")
    assert plain.run.key != alone.run.key
    assert "reuse" not in document(card) and document(card, reuse="none")["reuse"] == "none"
    check(document(card, reuse="none"), card)
    with pytest.raises(InvalidJob, match="reuse"):
        check({**document(card), "reuse": "prefix"}, card)


def test_a_model_without_shared_rows_says_why(card: ModelCard) -> None:
    """Its requests stand alone; a job that a stranger wrote otherwise is refused."""
    card = dataclasses.replace(card, no_prefix_reuse="its attention is bidirectional")
    assert ModelCard.from_dict(card.to_dict()).no_prefix_reuse == card.no_prefix_reuse
    assert request(card).reuse == "none"
    written = document(card)
    check(written, card)
    del written["reuse"]
    with pytest.raises(InvalidJob, match="bidirectional"):
        check(written, card)


def test_which_rows_may_be_shared_is_told_by_their_names() -> None:
    """As the vocabulary has them: hooks, but for those as wide as the run; readouts, but for reductions."""
    for point in HOOK_POINTS:
        assert reach(point.name.format(layer=3)) == (None if "k_pos" in point.shape else 0)
    for name, op in entries.OPS.items():
        ahead = None if op.reduces else int(name == "loss")
        assert reach(f"blocks.0.hook_resid_post|{name}(1)") == ahead
    assert reach("blocks.0.hook_resid_post|lens.top_k(1).values") == 0
    assert reach(GENERATION) is None


def test_equal_documents_are_one_job(card: ModelCard) -> None:
    assert job_id(document(card)) == job_id(document(card, hooks=["unembed.hook_out", "blocks.1.hook_out"]))
    assert job_id(document(card)) != job_id(document(card, positions="last"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "text"}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [0, 100]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [1, 2.5]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1] * 64}, "prompt"),
        ({"prompt": [1] * 50, "sampling": sampling_document(max_tokens=20)}, "prompt"),
        ({"prompt": [1] * 5, "sampling": sampling_document(max_tokens=9999)}, "max_tokens"),
        ({"hooks": []}, "hooks"),
        ({"positions": 10}, "positions"),
        ({"positions": "generated"}, "positions"),
    ],
)
def test_bad_calls_name_the_field(card: ModelCard, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidJob) as error:
        request(card, **changes)
    assert error.value.field == field
    assert error.value.job_id is None


def test_too_long_a_prompt_names_the_numbers(card: ModelCard) -> None:
    with pytest.raises(InvalidJob, match=r"64 tokens.*at most 63.*max_model_len 64"):
        request(card, prompt=[1] * 64)
    assert len(request(card, prompt=[1] * 63).tokens) == 63


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_bad_sampling_names_the_field(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidJob) as error:
        sampling_document(**arguments)
    assert error.value.field == field


def broken(card: ModelCard) -> dict[str, Any]:
    edits = [add("resid_mid.1", np.ones(16))]
    good = document(card, interventions=edits)
    other = {
        "not an object": [],
        "version": good | {"v": 2},
        "kind": good | {"kind": "exec"},
        "model": good | {"model": "other@1"},
        "extra field": good | {"func": "os.system"},
        "no tokens": good | {"tokens": []},
        "token type": good | {"tokens": [1, "2"]},
        "token range": good | {"tokens": [10**9]},
        "too long": good | {"tokens": [1] * 64},
        "sampling for a capture": good | {"sampling": sampling_document()},
        "generate without sampling": good | {"kind": "generate"},
        "sampling not canonical": good | {"kind": "generate", "sampling": {**sampling_document(), "top_p": 0.5}},
        "sampling unknown field": good | {"kind": "generate", "sampling": {"best_of": 2}},
        "nonce": good | {"nonce": 5},
        "captures": good | {"captures": None},
        "capture group": good | {"captures": [5]},
        "unsorted": good | {"captures": [{"hooks": ["hook_embed"], "ranges": [[5, 6], [0, 1]]}]},
        "overlapping": good | {"captures": [{"hooks": ["hook_embed"], "ranges": [[0, 3], [2, 4]]}]},
        "open in a capture": good | {"captures": [{"hooks": ["hook_embed"], "ranges": [[0, None]]}]},
        "beyond the prompt": good | {"captures": [{"hooks": ["hook_embed"], "ranges": [[0, 11]]}]},
        "twice": good | {"captures": [{"hooks": ["hook_embed", "hook_embed"], "ranges": [[0, 1]]}]},
        "op": good | {"interventions": [{"op": "exec", "hook": "hook_embed", "ranges": [[0, 1]]}]},
        "factor": good | {"interventions": [{"op": "scale", "hook": "hook_embed", "ranges": [[0, 1]], "factor": "2"}]},
        "no factor": good | {"interventions": [{"op": "scale", "hook": "hook_embed", "ranges": [[0, 1]]}]},
        "array path": good
        | {"interventions": [good["interventions"][0] | {"value": {"array": "../" * 20 + "etc/passwd"}}]},
        "fetch": {"v": 1, "kind": "fetch", "model": card.id, "run": [], "names": {}, "limit": 1},
    }
    return other


def test_worker_refuses_what_a_stranger_wrote(card: ModelCard) -> None:
    for what, bad in broken(card).items():
        with pytest.raises(InvalidJob):
            check(bad, card)
            pytest.fail(f"accepted: {what}")
    unknown = document(card) | {"captures": [{"hooks": ["hook_nothing"], "ranges": [[0, 1]]}]}
    with pytest.raises(UnknownHook):
        check(unknown, card)
    edit = {"op": "zero", "hook": "unembed.hook_out", "ranges": [[0, 1]]}
    with pytest.raises(UnsupportedHook):
        check(document(card) | {"interventions": [edit]}, card)


def test_errors_survive_the_wire() -> None:
    def all_errors(cls: type[LenspoolError]) -> set[type[LenspoolError]]:
        """The error tree that users see; tests, and integrations on the client, derive their own from it."""
        ours = {sub for sub in cls.__subclasses__() if sub.__module__ in ("lenspool.errors", "lenspool_cache.errors")}
        return {cls}.union(*(all_errors(sub) for sub in ours))

    import lenspool.errors as errors

    examples = [
        errors.InvalidJob("positions", "empty", "ints"),
        errors.UnknownHook("a", ["b"]),
        errors.UnsupportedHook("a", "why"),
        errors.UnknownModel("a", ["b"]),
        errors.DeadlineExceeded("run", 3.0),
        errors.JobCancelled("by you"),
        errors.PoolUnavailable("gone"),
        errors.QueueFull(5),
        errors.WorkerLost(3),
        errors.EngineFailed("rows missing"),
        errors.CacheCorrupt("ab"),
        errors.CacheFull("/store", 10),
        errors.CacheMiss("resid_post.3", "evicted since"),
        errors.CacheError("other"),
        errors.LenspoolError("root"),
    ]
    assert {type(e) for e in examples} == all_errors(LenspoolError)
    for error in examples:
        again = from_wire(to_wire(error), "job")
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.job_id == "job"
        assert again.retryable == error.retryable
    assert "ValueError: x" in str(from_wire(to_wire(ValueError("x"))))
    assert isinstance(from_wire("Traceback\nKeyError: 1"), errors.EngineFailed)
