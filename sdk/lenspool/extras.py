"""Libraries that only some results need, imported when they are: each is an extra of the package."""

from __future__ import annotations

import importlib
from typing import Any


def pyplot() -> Any:
    """Pyplot of matplotlib, for pictures.

    Raises
    ------
    ImportError
        It is not installed; names the extra.
    """
    return _needed("matplotlib.pyplot", "plots need matplotlib", "plot")


def xarray() -> Any:
    """The module xarray, for labelled arrays.

    Raises
    ------
    ImportError
        It is not installed; names the extra.
    """
    return _needed("xarray", "labelled arrays need xarray", "xarray")


def parquet() -> Any:
    """The module `pyarrow.parquet`.

    Raises
    ------
    ImportError
        It is not installed; names the extra.
    """
    return _needed("pyarrow.parquet", "Parquet files need pyarrow", "data")


def hugging_face_datasets() -> Any:
    """The module `datasets`.

    Raises
    ------
    ImportError
        It is not installed; names the extra.
    """
    return _needed("datasets", "this export needs datasets", "data")


def safetensors() -> Any:
    """The module `safetensors.numpy`.

    Raises
    ------
    ImportError
        It is not installed; names the extra.
    """
    return _needed("safetensors.numpy", ".safetensors files need it", "safetensors")


def zarr() -> Any:
    """The module `zarr`.

    Raises
    ------
    ImportError
        It is not installed; names the extra.
    """
    return _needed("zarr", "this export needs zarr", "data")


def literal(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def _needed(module: str, need: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{need}: pip install 'lenspool[{extra}]'") from error
