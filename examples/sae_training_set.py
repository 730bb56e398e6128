"""A training set for a sparse autoencoder, from any text files.

`python examples/sae_training_set.py FOLDER FILE...` packs the files' paragraphs into contexts, captures the residual
stream of a middle layer, trains a small SAE on it for a moment, and leaves the activations for SAELens in FOLDER.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

import lenspool
from lenspool import Client, Dataset
from lenspool.feeds import save_sae_lens
from lenspool_worker.demo_model import default_folder, prepare

HOOK = "resid_post.15"
CONTEXT = 128


async def captured(client: Client, files: Iterable[Path]) -> Dataset:
    rows = [
        {"text": paragraph, "file": path.name}
        for path in files
        for paragraph in path.read_text().split("\n\n")
        if paragraph.strip()
    ]
    return await client.dataset(
        "sae", rows, HOOK, context=CONTEXT, separator="<|endoftext|>", begin="<|endoftext|>", progress=True
    )


def trained(dataset: Dataset, steps: int, features: int = 1024, k: int = 32) -> list[float]:
    """Loss of each step of a TopK SAE (Gao et al. 2024), as a share of the variance."""
    statistics = dataset.statistics(HOOK, skip=1)  # the first position is an attention sink of another size
    mean, scale = torch.tensor(statistics.mean).float(), float((statistics.std**2).sum()) ** 0.5
    width = dataset.width(HOOK)
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(width, features), nn.Linear(features, width)
    decoder.weight.data = nn.functional.normalize(decoder.weight.data, dim=0)
    encoder.weight.data = decoder.weight.data.T.clone()
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    losses: list[float] = []
    tokens = dataset.torch_tokens(HOOK, 256, skip=1, seed=0)
    while len(losses) < steps:
        for batch in tokens:  # an epoch; the next one has another order
            x = (batch - mean) / scale
            values, places = encoder(x).topk(k, dim=1)
            codes = torch.zeros(len(x), features).scatter(1, places, values.relu())
            loss = (decoder(codes) - x).pow(2).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses[:steps]


async def main(folder: Path, files: list[Path]) -> None:
    model = prepare(default_folder())
    async with lenspool.connect_local(model, engine={"dtype": "float32"}) as client:
        dataset = await captured(client, files)
    print(dataset, dataset.statistics(HOOK), sep="\n")
    losses = trained(dataset, 200)
    print(f"variance that is not explained: {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")
    print("for SAELens:", save_sae_lens(dataset, HOOK, folder))


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]]
    if not given:
        raise SystemExit(__doc__)
    asyncio.run(main(given[0], given[1:] or sorted(Path("docs").glob("*.md"))))
