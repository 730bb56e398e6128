"""SAELens: its cached activations, and its encoders run by the pool. Needs `datasets`; torch only for the encoder."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lenspool.datasets.manifest import Dataset
from lenspool.datasets.mapped import plain_dtype
from lenspool.errors import InvalidJob
from lenspool.extras import needed
from lenspool.feeds.contexts import Contexts, context_of
from lenspool.readouts import Readout, sae

_ARCHITECTURES = ("standard", "topk", "jumprelu")
_WRITTEN_ROWS = 1 << 26
"""Bytes of rows that are held before they are written."""


def save_sae_lens(
    dataset: Dataset,
    hook: str | Readout,
    folder: str | os.PathLike[str],
    *,
    context: int | None = None,
    dtype: Any | None = None,
    progress: bool = False,
) -> dict[str, int]:
    """Write activations as SAELens's `ActivationsStore` reads them from `cached_activations_path`.

    A `datasets.Dataset` on the disk with a column named by the hook, `Array2D` `[context, d_in]`, and `token_ids`. The
    settings of the training have the same `hook_name`, `context_size` and `d_in`.

    Parameters
    ----------
    folder
        Must not exist, or be empty.
    context
        Tokens per row; default what the dataset was packed to. Longer sequences are cut into several; remainders and
        shorter ones are left out.
    dtype
        Default as stored, bfloat16 as float32.
    progress
        Show a bar, in a terminal (on stderr) or notebook only.

    Returns
    -------
    dict
        `contexts` and `tokens` that were written, `left_out` tokens.
    """
    name, target, length = dataset.column(hook), Path(folder), context_of(dataset, context)
    if target.exists() and any(target.iterdir()):
        raise InvalidJob("folder", f"{target} is not empty", "a new folder")
    hf = needed("datasets")
    chosen, width = plain_dtype(dataset.dtype(name), dtype), dataset.width(name)
    features = hf.Features(
        {name: hf.Array2D((length, width), chosen.name), "token_ids": hf.Sequence(hf.Value("int32"), length=length)}
    )
    contexts, count = Contexts(dataset, name, length, progress=progress), 0

    def rows() -> Iterator[dict[str, np.ndarray]]:
        nonlocal count
        for tokens, activations in contexts:
            count += 1
            yield {name: activations.astype(chosen, copy=False), "token_ids": tokens.astype(np.int32)}

    batch = max(1, _WRITTEN_ROWS // (length * width * chosen.itemsize))
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        from datasets.arrow_writer import ArrowWriter

        draft.mkdir(parents=True)
        with ArrowWriter(path=str(draft / "rows.arrow"), features=features, writer_batch_size=batch) as writer:
            for row in rows():
                writer.write(row)
            writer.finalize()
        if not count:
            raise InvalidJob("context", f"no sequence has {length} tokens", "a smaller one")
        hf.Dataset.from_file(str(draft / "rows.arrow")).save_to_disk(str(target))
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return {"contexts": count, "tokens": count * length, "left_out": contexts.left_out}


def encoder(model: Any, hook: str | None = None) -> Readout:
    """The encoder of an SAE of SAELens as a readout: the pool computes its features.

    Parameters
    ----------
    model
        A `sae_lens.SAE` of architecture `standard`, `topk` or `jumprelu` (BatchTopK is saved as that), e.g. of
        `SAE.load_from_disk`.
    hook
        Where it reads; default the hook that its metadata names.

    Raises
    ------
    InvalidJob
        Its encoder does something that the pool does not.
    """
    cfg = model.cfg
    architecture = cfg.architecture()
    if architecture not in _ARCHITECTURES:
        raise InvalidJob("model", f"its architecture is {architecture}", ", ".join(_ARCHITECTURES))
    if cfg.normalize_activations not in ("none", "expected_average_only_in"):  # the latter is folded into the weights
        raise InvalidJob("model", f"it normalizes activations by {cfg.normalize_activations}", "none")
    where = hook or cfg.metadata.hook_name
    if not isinstance(where, str):
        raise InvalidJob("hook", "the SAE does not tell where it reads", "the name of a hook")
    weights, bias = _array(model.W_enc), _array(model.b_enc)
    if getattr(cfg, "rescale_acts_by_decoder_norm", False):  # the scale of a column goes through its ReLU
        norms = np.linalg.norm(_array(model.W_dec), axis=1)
        weights, bias = weights * norms, bias * norms
    return sae(
        where,
        weights,
        bias,
        _array(model.b_dec) if cfg.apply_b_dec_to_input else None,
        _array(model.threshold) if architecture == "jumprelu" else None,
        activation={"standard": "relu"}.get(architecture, architecture),
        k=cfg.k if architecture == "topk" else None,
    )


def _array(parameter: Any) -> np.ndarray:
    values: np.ndarray = parameter.detach().cpu().float().numpy()
    return values
