"""Rows that are spread over processes: put together, taken apart, and what happens to a process out of step."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from lenspool_worker.batch import EditSlice, Slice, StepPlan
from lenspool_worker.capture import JobRows
from lenspool_worker.edits import Edit
from lenspool_worker.parallel import Place, Shard, joined
from lenspool_worker.taps import Taps

ROWS = torch.arange(24.0).view(2, 12)


def shards(size: int, copies: int) -> tuple[list[Shard], list[torch.Tensor]]:
    """What each process of a group has of `ROWS`."""
    parts = [ROWS.chunk(size // copies, 1)[rank // copies].contiguous() for rank in range(size)]

    def all_gather(part: torch.Tensor) -> torch.Tensor:
        assert part.is_contiguous()
        return torch.cat([other[-len(part) :] for other in parts], 1)  # the last rows are those that are edited

    return [Shard(Place(size, rank, all_gather=all_gather), copies) for rank in range(size)], parts


@pytest.mark.parametrize(("size", "copies"), [(2, 1), (4, 1), (4, 2), (2, 2), (6, 2)])
def test_whole_rows_have_each_part_once(size: int, copies: int) -> None:
    made, parts = shards(size, copies)
    for shard, part in zip(made, parts, strict=True):
        assert shard.parts == size // copies
        assert torch.equal(shard.whole(lambda part=part: part), ROWS)
        assert torch.equal(shard.own(ROWS), part)


def test_edits_and_captures_of_a_shard_are_of_whole_rows() -> None:
    """Each process keeps its part of what was edited, and captures the whole of it."""
    for rank in range(4):
        made, parts = shards(4, 2)
        taps = Taps()
        site = taps.site("here", 6, made[rank])
        job = JobRows("tag")
        value = torch.arange(100.0, 112.0)
        taps.plan = StepPlan({site: [Slice(0, 2, 5, job)]}, {site: [EditSlice(1, 2, 0, Edit("set", value=value), job)]})
        for other, part in enumerate(parts):  # as the other processes do at the same time
            part[1] = value[other // 2 * 6 :][:6] if other != rank else part[1]
        mine = parts[rank]
        taps.plain(mine.view(2, 2, 3), site)
        assert job.error is None
        assert torch.equal(mine[1], value[rank // 2 * 6 :][:6]) and torch.equal(mine[0], made[rank].own(ROWS)[0])
        ((_, rows),) = job.assemble("here", [(5, 7)])
        assert torch.equal(torch.from_numpy(rows), torch.stack([ROWS[0], value]))


def test_a_process_that_stores_nothing_holds_nothing() -> None:
    job = JobRows("tag", keep=False)
    seen: list[int] = []
    job.readers["read"] = lambda position, _: seen.append(position)
    job.add("held", 0, ROWS)
    job.add("read", 3, ROWS)
    job.read()
    assert job.bytes == 0 and job.fired() == {} and seen == [3]


def test_a_process_out_of_step_ends() -> None:
    """The others would wait for it; alone, the error is the job's."""
    with pytest.raises(ZeroDivisionError):
        Place().together(lambda: 1 // 0)
    script = """
        from lenspool_worker.parallel import Place
        try:
            Place(2, 1).together(lambda: 1 // 0)
        finally:
            print("went on")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "went on" not in done.stdout and "out of step" in done.stderr


def test_descriptions_are_joined_in_network_order() -> None:
    def part(writes: bool, *names: str, **refusals: str) -> dict[str, object]:
        hooks = [{"name": name} for name in names]
        return {"refusal": None, "writes": writes, "known": True, "hooks": hooks, "refusals": refusals}

    parts = [part(True, "a", "b", x="first"), part(False, "a", "b"), part(True, "c", x="last", y="why")]
    whole = joined([*parts, part(False, "c")])
    assert [hook["name"] for hook in whole["hooks"]] == ["a", "b", "c"]
    assert whole["refusals"] == {"x": "first", "y": "why"} and whole["known"]
    assert joined([parts[0], {"refusal": "no layers"}])["refusal"] == "no layers"
