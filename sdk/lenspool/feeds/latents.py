"""Features of a sparse autoencoder as delphi's latent cache, from which it makes explanations. Needs safetensors."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import numpy as np

from lenspool import entries
from lenspool.datasets.manifest import Dataset
from lenspool.errors import InvalidJob
from lenspool.extras import needed
from lenspool.progress import tracked
from lenspool.readouts import Features, Readout

_SMALLEST = 1e-5
"""delphi's own: activations that are not larger are not kept."""


def save_latents(
    dataset: Dataset,
    folder: str | os.PathLike[str],
    features: str | Readout | None = None,
    *,
    n_splits: int = 5,
    model_name: str | None = None,
    progress: bool = False,
) -> dict[str, int]:
    """Write the features of a dataset that was captured with `readouts.sae` as delphi's `LatentDataset` reads them.

    A folder named by the hook, with a `config.json` and files `<first>_<last>.safetensors`: `locations`
    `[activations, 3]` (context, position, feature less the file's first), `activations` (float16) and `tokens`
    `[contexts, length]`. Memory is that of one file's, and of the tokens.

    Parameters
    ----------
    features
        Which readout; default the dataset's only `sae`.
    n_splits
        Files.
    model_name
        Of the model on the Hugging Face hub, or its folder: delphi loads the tokenizer by it; default the pool's name.
    progress
        Show a bar, in a terminal (on stderr) or notebook only.

    Returns
    -------
    dict
        `contexts`, `activations`, and `left_out` tokens: of sequences that are not as long as the longest.

    Raises
    ------
    InvalidJob
        The dataset has no such features, or of some positions only.
    """
    name = _sae_of(dataset, features)
    entry = entries.parse(name)
    if type(n_splits) is not int or not 1 <= n_splits <= entry.args[2]:
        raise InvalidJob("n_splits", f"got {n_splits!r}", f"an int from 1 to {entry.args[2]}, the number of features")
    target = Path(folder) / entry.hook
    target.mkdir(parents=True, exist_ok=True)
    lengths = [len(dataset.positions(i)) for i in range(len(dataset))]
    length = max(lengths, default=0)
    taken = [i for i, n in enumerate(lengths) if n == length]
    if not taken or not np.array_equal(dataset.positions(taken[0]), np.arange(length)):
        raise InvalidJob("dataset", "it does not have all positions", "a dataset of positions='all'")
    bounds = np.linspace(0, entry.args[2], n_splits + 1).astype(np.int64)
    tokens = np.stack([dataset.token_ids(i) for i in taken])
    count = 0
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        spills = [(Path(scratch) / f"{i}.places", Path(scratch) / f"{i}.values") for i in range(n_splits)]
        for context, number in enumerate(tracked(taken, progress, "latents")):
            count += _spill(dataset[number][name], context, bounds, spills)
        for first, stop, (places, values) in zip(bounds, bounds[1:], spills, strict=False):
            arrays = {**_split(places, values, first), "tokens": tokens}
            needed("safetensors.numpy").save_file(arrays, target / f"{first}_{stop - 1}.safetensors")
    config = {
        "dataset_repo": f"lenspool:{dataset.name}",
        "dataset_split": "",
        "dataset_name": "",
        "dataset_column": "text",
        "batch_size": 1,
        "cache_ctx_len": length,
        "ctx_len": length,
        "n_tokens": int(tokens.size),
        "n_splits": n_splits,
        "model_name": model_name or dataset.card.name,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return {"contexts": len(taken), "activations": count, "left_out": sum(lengths) - int(tokens.size)}


def _sae_of(dataset: Dataset, features: str | Readout | None) -> str:
    if features is not None:
        name = dataset.column(features)
        if not entries.is_readout(name) or entries.parse(name).op != "sae":
            raise InvalidJob("features", f"{name} has no features", "a readout made by readouts.sae")
        return name
    found = [name for name in dataset.hooks if entries.is_readout(name) and entries.parse(name).op == "sae"]
    if len(found) != 1:
        raise InvalidJob("features", f"the dataset has {len(found)} readouts made by readouts.sae", "one, or say which")
    return found[0]


def _spill(found: Features, context: int, bounds: np.ndarray, spills: list[tuple[Path, Path]]) -> int:
    """Append the active features of one context to the files of their splits; how many."""
    position, slot = np.nonzero((found.indices >= 0) & (np.abs(found.values) > _SMALLEST))
    feature = found.indices[position, slot].astype(np.int64)
    order = np.lexsort((feature, position))
    position, slot, feature = position[order], slot[order], feature[order]
    split = np.searchsorted(bounds, feature, "right") - 1
    for i in np.unique(split):
        here = split == i
        places = np.stack([np.full(here.sum(), context), position[here], feature[here] - bounds[i]], 1)
        with spills[i][0].open("ab") as stream:
            stream.write(places.astype(np.uint32).tobytes())
        with spills[i][1].open("ab") as stream:
            stream.write(found.values[position[here], slot[here]].astype(np.float16).tobytes())
    return len(feature)


def _split(places: Path, values: Path, first: int) -> dict[str, np.ndarray]:
    """Arrays of one file, the numbers in the smallest type that delphi uses."""
    if not places.exists():
        return {"locations": np.empty((0, 3), np.uint16), "activations": np.empty(0, np.float16)}
    locations = np.fromfile(places, np.uint32).reshape(-1, 3)
    small = locations.max() < 2**16
    return {
        "locations": locations.astype(np.uint16) if small else locations,
        "activations": np.fromfile(values, np.float16),
    }
