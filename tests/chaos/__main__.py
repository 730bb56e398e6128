"""A storm over a real pool: `make chaos`. Two real workers of one tiny model, a real server, and a fault at a time.

Forty askers ask without a pause, each waiting for its answer, which is compared with transformers' float32. A question
counts for the fault in whose time it was asked: from the fault to the next one, which comes when 100 answers have come
after its end and both workers serve again.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from lenspool import Client
from tests import tiny_llama
from tests.chaos.faults import FAULTS, Site
from tests.chaos.questions import Questions

ASKERS, WORKERS, ENOUGH = 40, 2, 100
HUNG_S = 240.0
_TABLE = re.compile(r"(<!-- storm -->\n).*?(<!-- /storm -->)", re.DOTALL)


@dataclass
class Tally:
    """What became of the questions of one fault."""

    meaning: str
    asked: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    hung: int = 0
    longest: float = 0.0

    @property
    def bad(self) -> int:
        return len(self.wrong) + len(self.lost) + self.hung

    def row(self) -> str:
        counts = (self.right, len(self.lost), len(self.wrong), self.hung)
        return f"| {self.meaning} | {' | '.join(map(str, counts))} | {self.longest:.1f} |"


async def asker(client: Client, questions: Questions, now: list[Tally], stop: asyncio.Event) -> None:
    while not stop.is_set():
        tally, began = now[-1], time.monotonic()
        tally.asked += 1
        try:
            async with asyncio.timeout(HUNG_S):
                problem = await questions.ask(client)
        except TimeoutError:
            tally.hung += 1
        except Exception as error:
            tally.lost.append(f"{type(error).__name__}: {error}")
        else:
            if problem:
                tally.wrong.append(problem)
            else:
                tally.right += 1
                tally.longest = max(tally.longest, time.monotonic() - began)


async def answered(tally: Tally, count: int) -> None:
    async with asyncio.timeout(2 * HUNG_S):
        while tally.right + tally.bad < count:
            await asyncio.sleep(0.1)


async def whole(client: Client) -> None:
    """Wait until every worker serves."""
    async with asyncio.timeout(2 * HUNG_S):
        while True:
            states = [worker.get("state") for row in await client.status() for worker in row["workers"]]
            if states == ["serving"] * WORKERS:
                return
            await asyncio.sleep(0.5)


async def storm(folder: Path, model: Path, rounds: int, seed: int) -> list[Tally]:
    site, questions = Site(folder, model, WORKERS), Questions(model, seed)
    stop, now = asyncio.Event(), [Tally("nothing yet: workers start")]
    totals = {fault.__name__: Tally((fault.__doc__ or "").splitlines()[0].rstrip(".")) for fault in FAULTS}
    with site.running():
        keeper = asyncio.create_task(site.keep())
        async with Client(site.broker.url, store=site.store) as client:
            await whole(client)
            askers = [asyncio.create_task(asker(client, questions, now, stop)) for _ in range(ASKERS)]
            await answered(now[0], ENOUGH)
            for _ in range(rounds):
                for fault in FAULTS:
                    await whole(client)
                    tally = totals[fault.__name__]
                    now.append(tally)
                    began = time.monotonic()
                    await fault(site, client)
                    await answered(tally, tally.right + tally.bad + ENOUGH)
                    print(f"{time.monotonic() - began:6.1f} s  {tally.row()}", flush=True)
            stop.set()
            await asyncio.gather(*askers)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
    return list(totals.values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="how often each fault is done")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--report", type=Path, help="Markdown file with a place for the table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = asyncio.run(storm(folder, tiny_llama.save(folder / "Tiny_Llama"), options.rounds, options.seed))
    head = ["| fault | right | lost | wrong | hung | longest wait, s |", "|---|---|---|---|---|---|"]
    table = "\n".join([*head, *(tally.row() for tally in found)]) + "\n"
    print(table)
    for tally in found:
        for problem in (*tally.lost, *tally.wrong):
            print(f"{tally.meaning}: {problem}")
    if options.report:
        text = options.report.read_text()
        options.report.write_text(_TABLE.sub(lambda match: match[1] + table + match[2], text))
    return int(any(tally.bad for tally in found))


if __name__ == "__main__":
    sys.exit(main())
