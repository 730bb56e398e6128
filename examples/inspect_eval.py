"""An inspect_ai eval on a pool: 60 questions plain, with activations captured, and steered; then the logs are read.

make eval-inspect, or: python examples/inspect_eval.py [--url redis://host:6379 --model NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

import lenspool
from lenspool import Client
from lenspool.integrations.inspect import load
from lenspool.integrations.wire import array_ref

CAPITALS = """
France:Paris Italy:Rome Spain:Madrid Germany:Berlin Japan:Tokyo China:Beijing Egypt:Cairo Greece:Athens
Portugal:Lisbon Austria:Vienna Russia:Moscow Poland:Warsaw Norway:Oslo Sweden:Stockholm Denmark:Copenhagen
Ireland:Dublin Cuba:Havana Peru:Lima Chile:Santiago Kenya:Nairobi Turkey:Ankara Hungary:Budapest
Belgium:Brussels Finland:Helsinki Iran:Tehran Iraq:Baghdad Syria:Damascus Lebanon:Beirut Jordan:Amman
Thailand:Bangkok Vietnam:Hanoi Indonesia:Jakarta Malaysia:Lumpur Philippines:Manila Nepal:Kathmandu
Pakistan:Islamabad Bangladesh:Dhaka Mongolia:Ulaanbaatar Canada:Ottawa Mexico:Mexico Brazil:Brasilia
Argentina:Aires Colombia:Bogota Venezuela:Caracas Ecuador:Quito Bolivia:Paz Uruguay:Montevideo
Paraguay:Asuncion Jamaica:Kingston Nigeria:Abuja Ghana:Accra Ethiopia:Addis Morocco:Rabat Tunisia:Tunis
Algeria:Algiers Libya:Tripoli Romania:Bucharest Bulgaria:Sofia Serbia:Belgrade Croatia:Zagreb
"""
HOOK = "blocks.12.hook_resid_post"
os.environ.setdefault("INSPECT_DISPLAY", "none")
CONFIG = GenerateConfig(temperature=0, max_tokens=16)


def questions(name: str) -> Task:
    pairs = [pair.split(":") for pair in CAPITALS.split()]
    dataset = [Sample(f"What is the capital of {country}?", target=city) for country, city in pairs]
    return Task(dataset, solver=generate(), scorer=includes(), config=CONFIG, name=name)


async def report(task: Task, model: Model, folder: Path) -> EvalLog:
    """Run an eval, and read its log back."""
    began = time.perf_counter()
    (done,) = await eval_async(task, model=model, log_dir=str(folder), max_connections=64)
    seconds = time.perf_counter() - began
    log = read_eval_log(done.location)
    assert log.status == "success" and log.results is not None and log.samples is not None, log.error
    accuracy = log.results.scores[0].metrics["accuracy"].value
    size = Path(log.location).stat().st_size
    told = f"{len(log.samples)} samples, accuracy {accuracy:.2f}, {seconds:.1f} s, log {size / 1e3:.0f} kB"
    print(f"{task.name:10} {told}")
    return log


async def main(client: Client) -> None:
    folder = Path(tempfile.mkdtemp(prefix="lenspool-eval-"))
    name, url = f"lenspool/{client.model}", client.url

    few = [pair.split(":")[0] for pair in CAPITALS.split()[:8]]
    plain = get_model(name, base_url=url)
    began = time.perf_counter()
    for country in few:
        await plain.generate(f"Where is {country}?", config=CONFIG)
    alone = (time.perf_counter() - began) / len(few)
    print(f"{'one by one':10} {alone:.2f} s each")

    await report(questions("plain"), plain, folder)
    watched = get_model(name, base_url=url, capture=[HOOK, "blocks.*.hook_attn_out"])
    log = await report(questions("captured"), watched, folder)
    assert log.samples is not None
    rows = [load(sample)[0] for sample in log.samples]
    size = sum(array.nbytes for turn in rows for array in turn.numpy().values())
    print(f"{'':10} {size / 1e6:.0f} MB of activations, opened from the log; {rows[0]!r}")

    right = np.array([(s.scores or {})["includes"].value == "C" for s in log.samples])
    last = np.stack([turn[HOOK][-1] for turn in rows])
    direction = array_ref(await client.put(last[~right].mean(axis=0) - last[right].mean(axis=0)))
    for dose in (4.0, 16.0):
        edit = {"12:resid_post": {"op": "add", "value": direction, "coefficient": dose}}
        steered = get_model(name, base_url=url, interventions=edit, capture=HOOK)
        await report(questions(f"steered {dose:g}"), steered, folder)
    batches = [worker.get("max_batch", 0) for row in await client.status() for worker in row["workers"]]
    print(f"most samples in one step of the engine: {max(batches)}")
    print(f"logs: {folder} (inspect view --log-dir {folder})")


@asynccontextmanager
async def pool(arguments: argparse.Namespace) -> AsyncIterator[Client]:
    """The pool that was named, or one of its own with the demo model."""
    if arguments.url:
        async with Client(arguments.url, model=arguments.model) as client:
            client.model = (await client.card()).name
            yield client
        return
    from lenspool_worker.demo_model import default_folder, prepare

    with tempfile.TemporaryDirectory(prefix="lenspool-store-") as store:
        engine = {"dtype": "float32", "max_model_len": 1024}
        async with lenspool.connect_local(prepare(default_folder()), store=store, engine=engine) as client:
            yield client


async def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--model")
    async with pool(parser.parse_args()) as client:
        await main(client)


if __name__ == "__main__":
    asyncio.run(run())
