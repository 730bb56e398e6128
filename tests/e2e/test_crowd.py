"""Many client processes on one pool: every distinct prompt is computed once, and everyone gets its own answer."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np

from lenspool import Client, add
from tests.e2e.conftest import counters, relative

CLIENTS, EACH, DISTINCT = 10, 50, 120
SCRIPT = """
import asyncio, json, sys
import numpy as np
from lenspool import Client, add

async def main(url, prompts):
    async with Client(url) as client:
        out = []
        async for r in client.map(prompts, ["resid_post.0", "resid_post.29"], concurrency=50):
            out.append([r.token_ids, r["resid_post.29"].astype(float).sum(axis=0)[:8].tolist(),
                        float(np.linalg.norm(r["resid_post.0"]))])
        print(json.dumps(out))

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


def crowd_prompts() -> list[str]:
    words = ["apple", "river", "engine", "violin", "desert", "planet", "letter", "market", "winter", "mirror"]
    return [f"Prompt {i}: " + " ".join(words[(i * k) % 10] for k in range(1, 3 + i % 23)) for i in range(DISTINCT)]


async def test_ten_processes_fifty_prompts_each_with_overlaps(client: Client) -> None:
    prompts = crowd_prompts()
    shares = [[prompts[(c * 12 + k) % DISTINCT] for k in range(EACH)] for c in range(CLIENTS)]
    assert len({p for share in shares for p in share}) == DISTINCT
    before = await counters(client)

    async def one(share: list[str]) -> list[list[object]]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SCRIPT, client.url, json.dumps(share), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        answers: list[list[object]] = json.loads(out)
        return answers

    answers = await asyncio.gather(*(one(share) for share in shares))
    after = await counters(client)

    # the oracle: each prompt alone, one after another, computed anew (another hook, so that nothing is reused)
    lengths = {}
    for i in range(0, DISTINCT, 8):
        solo = await client.capture(prompts[i], ["resid_mid.0", "resid_post.0", "resid_post.29"])
        lengths[prompts[i]] = solo
    ids = {p: (await client.capture(p, "resid_post.0")).token_ids for p in prompts}
    assert after["tokens"] - before["tokens"] == sum(map(len, ids.values())), "each distinct prompt ran exactly once"
    for share, answer in zip(shares, answers, strict=True):
        for prompt, (token_ids, sums, norm) in zip(share, answer, strict=True):
            assert token_ids == ids[prompt]
            if prompt in lengths:
                solo = lengths[prompt]
                expected = solo["resid_post.29"].astype(float).sum(axis=0)[:8]
                assert np.allclose(sums, expected, rtol=1e-6)
                assert np.isclose(norm, np.linalg.norm(solo["resid_post.0"]), rtol=1e-6)


async def test_crowd_equals_solo(client: Client) -> None:
    """32 prompts in flight at once against the same prompts one at a time, every answer nearest to its own prompt."""
    hook = "blocks.20.hook_resid_post"
    prompts = [f"{p} (crowd or solo)" for p in crowd_prompts()[:32]]
    crowd = await asyncio.gather(*(client.capture(p, hook) for p in prompts))
    solo = []
    for prompt in prompts:
        # an edit that changes nothing is another run, so it is computed anew
        solo.append(await client.capture(prompt, hook, interventions=add(hook, 0.0)))
    for i, result in enumerate(crowd):
        assert not solo[i].cached
        assert relative(solo[i][hook], result[hook]) <= 1e-5
        distances = [
            np.linalg.norm(result[hook][-1] - other[hook][-1]) for other in solo if other[hook].shape[1] == 576
        ]
        assert int(np.argmin(distances)) == i


async def test_equal_requests_of_one_script_are_one_job(client: Client, store: Path) -> None:
    before = await counters(client)
    results = await asyncio.gather(*(client.capture("Everyone asks the same", "resid_post.5") for _ in range(40)))
    after = await counters(client)
    assert after["tokens"] - before["tokens"] == len(results[0].token_ids)
    assert len({r["resid_post.5"].tobytes() for r in results}) == 1
