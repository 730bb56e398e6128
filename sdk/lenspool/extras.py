"""Libraries that only some results need, imported when they are: each belongs to an extra of the package."""

from __future__ import annotations

import importlib
from typing import Any

_EXTRAS = {
    "matplotlib.pyplot": ("plots need matplotlib", "plot"),
    "xarray": ("labelled arrays need xarray", "xarray"),
    "transformer_lens.model_bridge": ("the bridge needs TransformerLens 4.3", "transformer-lens"),
    "pyarrow.parquet": ("Parquet files need pyarrow", "data"),
    "datasets": ("this export needs datasets", "data"),
    "safetensors.numpy": (".safetensors files need it", "safetensors"),
    "zarr": ("this export needs zarr", "data"),
}
"""Module -> why it is wanted, and the extra that brings it."""


def needed(module: str) -> Any:
    """One of these modules.

    Raises
    ------
    ImportError
        It is not installed; names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        why, extra = _EXTRAS[module]
        raise ImportError(f"{why}: pip install 'lenspool[{extra}]'") from error


def literal(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")
