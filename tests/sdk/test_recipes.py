"""Results of recipes without a pool: what they say of themselves, and what a missing matplotlib says."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from lenspool.recipes import HeatMap, SteeringVector


def heat_map(values: np.ndarray) -> HeatMap:
    axes = {"hook": ["a", "b"], "position": ["0", "1", "2 '$x$'"]}
    return HeatMap(values, axes, "prob(3)", runs=8, computed=2)


def test_top_and_repr_name_the_strongest_cells() -> None:
    result = heat_map(np.array([[0.1, np.nan, -0.9], [0.5, 0.0, 0.2]]))
    assert result.top(2) == [("a", "2 '$x$'", -0.9), ("b", "0", 0.5)]
    assert repr(result) == "<HeatMap 2 hook x 3 position, prob(3): largest -0.9 at a, 2 '$x$'; 8 runs, 2 computed>"


@pytest.mark.parametrize("fill", [0.0, np.nan])
def test_flat_maps_draw(fill: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    axes = heat_map(np.full((2, 3), fill)).plot()
    axes.figure.canvas.draw()
    assert axes.images[0].get_clim() == (-1.0, 1.0)


def test_vector_of_nothing_has_no_projection() -> None:
    rows = np.ones((2, 4), dtype=np.float32)
    vector = SteeringVector("hook_embed", np.zeros(4, np.float32), rows, rows, 4, 4)
    assert vector.norm == 0.0 and not np.concatenate(vector.projections()).any()


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'lenspool\[plot\]'"):
        heat_map(np.zeros((2, 3))).plot()
