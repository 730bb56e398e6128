"""Captures as xarray objects: axes with names, rows with positions and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lenspool.errors import InvalidJob
from lenspool.extras import needed
from lenspool.layout import layout, parts
from lenspool.readouts import Readout

if TYPE_CHECKING:
    from lenspool.result import Capture


def data_array(capture: Capture, name: str | Readout) -> Any:
    """One hook or readout as `xarray.DataArray`; see `Capture.to_xarray`."""
    name = capture.canonical(name)
    if parts(name):
        raise InvalidJob("name", f"{name} is several arrays", "to_xarray() without a name, which has each of them")
    positions = layout(capture, name).positions
    return _labelled(capture, name, capture.numpy(name), positions)


def dataset(capture: Capture) -> Any:
    """Everything as `xarray.Dataset`; see `Capture.to_xarray`."""
    arrays: dict[str, Any] = {}
    sizes: dict[str, set[int]] = {}
    for name, part, values in _arrays(capture):
        positions = layout(capture, name).positions
        if positions is not None and len(positions) < len(capture.positions):  # a loss: NaN where there is none
            there = np.isin(capture.positions, positions)
            values = np.full(len(there), np.nan, values.dtype)
            values[there] = capture.numpy(name)
            positions = capture.positions
        arrays[part] = _labelled(capture, name, values, positions)
        for dim, size in arrays[part].sizes.items():
            sizes.setdefault(dim, set()).add(size)
    for part, array in arrays.items():
        arrays[part] = array.rename({d: f"{d}_{size}" for d, size in array.sizes.items() if len(sizes[d]) > 1})
    return needed("xarray").Dataset(arrays, attrs={"model": capture.card.id})


def _arrays(capture: Capture) -> Iterator[tuple[str, str, np.ndarray]]:
    """Name, name of the array, array."""
    for name in capture:
        if not parts(name):
            yield name, name, capture.numpy(name)
        for part in parts(name):
            yield name, f"{name}.{part}", getattr(capture[name], part)


def _labelled(capture: Capture, name: str, values: np.ndarray, positions: np.ndarray | None) -> Any:
    dims = layout(capture, name).dims[: values.ndim]  # the counts of an SAE have only rows
    coordinates: dict[str, Any] = {}
    if positions is not None:
        coordinates = _tokens(capture, "token", "", positions)
    if "key" in dims:
        coordinates |= _tokens(capture, "key", "key_", np.arange(values.shape[dims.index("key")]))
    array = needed("xarray").DataArray(
        values, dims=dims, coords=coordinates, name=name, attrs={"model": capture.card.id, "hook": name}
    )
    for index in ("position", "key_position"):
        if index in coordinates:
            array = array.set_xindex(index)
    return array


def _tokens(capture: Capture, dim: str, prefix: str, positions: np.ndarray) -> dict[str, Any]:
    ids = np.array(capture.sequence)
    found: dict[str, Any] = {
        f"{prefix}position": (dim, positions.copy()),
        f"{prefix}token_id": (dim, ids[positions]),
    }
    if capture.tokens is not None:
        found[f"{prefix}text"] = (dim, np.array(capture.tokens, dtype=object)[positions])
    return found
