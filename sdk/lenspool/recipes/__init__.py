"""Recipes: whole experiments in one call, made of ordinary captures, so that all of them is stored and never run twice.

>>> from lenspool.recipes import logit_diff, patching_sweep
>>> sweep = await patching_sweep(client, clean, corrupt, metric=logit_diff(" Mary", " John"))  # doctest: +SKIP
>>> sweep.values.shape, sweep.plot()  # doctest: +SKIP

With a client of `lenspool.sync`: `client.run(patching_sweep, clean, corrupt, metric=...)`.
"""

from lenspool.recipes.ablation import HeadAblation, head_ablation
from lenspool.recipes.heat_map import HeatMap
from lenspool.recipes.metrics import Metric, kl, logit_diff, prob
from lenspool.recipes.patching import PatchingSweep, patching_sweep
from lenspool.recipes.steering import SteeringVector, steering_vector
from lenspool.recipes.tracing import CausalTrace, causal_trace

__all__ = [
    "CausalTrace",
    "HeadAblation",
    "HeatMap",
    "Metric",
    "PatchingSweep",
    "SteeringVector",
    "causal_trace",
    "head_ablation",
    "kl",
    "logit_diff",
    "patching_sweep",
    "prob",
    "steering_vector",
]
