"""What a job makes of logits and streams, chunk by chunk, against the same operation on the whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lenspool.entries import LOGITS, Entry
from lenspool_cache.ranges import OpenRange
from lenspool_worker.capture import JobRows
from lenspool_worker.derived import DerivedHooks
from lenspool_worker.readouts import Readouts

STREAM, WIDTH, VOCABULARY, LENGTH = "blocks.0.hook_resid_post", 8, 50, 40


class Model(torch.nn.Module):
    """A norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


@pytest.fixture
def readouts() -> Readouts:
    torch.manual_seed(0)
    model = Model()
    widths = {STREAM: WIDTH, LOGITS: VOCABULARY}
    return Readouts(DerivedHooks(), widths, model, model.norm, torch.device("cpu"))


@pytest.fixture
def stream() -> torch.Tensor:
    return torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def run(readouts: Readouts, rows: JobRows, hook: str, whole: torch.Tensor, cuts: list[int]) -> None:
    """Rows as steps bring them; what is cut backwards has been preempted and comes again."""
    with torch.inference_mode():
        for start, stop in itertools.pairwise(cuts):
            start = min(start, stop - 1)
            rows.add(hook, start, whole[start:stop].clone())
            rows.read()


@pytest.mark.parametrize("cuts", [[0, 40], [0, 16, 32, 40], [0, 1, 2, 3, 40], [0, 30, 12, 40]])
def test_readouts_of_any_chunks_are_those_of_the_whole(readouts: Readouts, cuts: list[int]) -> None:
    logits = torch.randn(LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(2))
    tokens = [i % VOCABULARY for i in range(LENGTH)]
    wanted: dict[str, list[tuple[int, int]]] = {
        f"{LOGITS}|top_k(3).indices": [(2, 5), (14, 33)],
        f"{LOGITS}|top_k(3).values": [(0, 40)],
        f"{LOGITS}|loss()": [(0, 39)],
        f"{LOGITS}|entropy()": [(39, 40)],
        LOGITS: [(7, 9)],
    }
    asked: list[tuple[list[str], list[OpenRange]]] = [([name], list(ranges)) for name, ranges in wanted.items()]
    ((source, ranges),) = readouts.sources(asked)
    assert (source, ranges) == (LOGITS, [(0, 40)])
    rows = JobRows("job")
    rows.readers = readouts.readers(rows, asked, tokens)
    run(readouts, rows, LOGITS, logits, cuts)
    got = readouts.assemble(rows, wanted, LENGTH)
    indices = np.concatenate([array for _, array in got[f"{LOGITS}|top_k(3).indices"]])
    top = logits.topk(3)
    assert (indices == top.indices.numpy()[[*range(2, 5), *range(14, 33)]]).all()
    assert (got[f"{LOGITS}|top_k(3).values"][0][1] == top.values.numpy()).all()
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")
    assert np.allclose(got[f"{LOGITS}|loss()"][0][1][:, 0], loss.numpy(), atol=1e-5)
    assert (got[LOGITS][0][1] == logits[7:9].numpy()).all()
    assert [start for start, _ in got[f"{LOGITS}|entropy()"]] == [39]


def test_a_stream_under_the_lens_is_held_only_where_it_is_wanted(readouts: Readouts, stream: torch.Tensor) -> None:
    lens = Entry(STREAM, "logits_of", ((1, 4),), lens=True).name
    whole: list[OpenRange] = [(0, LENGTH)]
    for others, held in (([], 0), ([STREAM], WIDTH), ([f"{STREAM}|norm()"], WIDTH)):
        rows = JobRows("job")
        asked = [([lens, *others], whole)]
        rows.readers = readouts.readers(rows, asked, [])
        run(readouts, rows, STREAM, stream, [0, 16, 32, 40])
        assert rows.bytes == LENGTH * 4 * (2 + held)
        got = readouts.assemble(rows, {name: [(0, LENGTH)] for name in (lens, *others)}, LENGTH)
        with torch.inference_mode():
            model = readouts._model
            want = model.head(model.norm(stream))[:, [1, 4]]
        assert np.allclose(got[lens][0][1], want.numpy(), atol=1e-6)
        for name in others:
            want = stream if name == STREAM else stream.norm(dim=-1, keepdim=True)
            assert np.allclose(got[name][0][1], want.numpy(), atol=1e-6)


def test_positions_that_never_came_are_named(readouts: Readouts) -> None:
    name = f"{LOGITS}|entropy()"
    rows = JobRows("job")
    rows.readers = readouts.readers(rows, [([name], [(0, 6)])], [])
    run(readouts, rows, LOGITS, torch.randn(4, VOCABULARY), [0, 4])
    with pytest.raises(LookupError, match=r"2 positions: \[4, 5\]"):
        readouts.assemble(rows, {name: [(0, 6)]}, 6)


def test_logits_that_are_minus_infinity_have_an_entropy(readouts: Readouts) -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[:, 2:] = -torch.inf
    names = [f"{LOGITS}|{op}" for op in ("entropy()", "logprobs([0,5])", "rank([0,5])")]
    rows = JobRows("job")
    rows.readers = readouts.readers(rows, [(names, [(0, 1)])], [])
    run(readouts, rows, LOGITS, logits, [0, 1])
    entropy, logprobs, rank = (rows.assemble(name, [(0, 1)])[0][1][0] for name in names)
    assert np.isclose(entropy[0], np.log(2))
    assert np.isclose(logprobs[0], -np.log(2)) and logprobs[1] == -np.inf
    assert rank.tolist() == [0, 2]
