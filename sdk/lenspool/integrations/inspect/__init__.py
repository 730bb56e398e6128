"""An inspect_ai provider: `get_model("lenspool/<model>")` is a model of a pool, with activations and interventions.

`load(sample)` opens the activations that an eval log refers to. See docs/inspect.md.
"""

from lenspool.integrations.inspect.references import fetch, load

__all__ = ["fetch", "load"]
