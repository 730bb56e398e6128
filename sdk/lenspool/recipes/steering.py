"""Steering vectors: the direction from one set of prompts to another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from lenspool import hooks as hk
from lenspool.errors import InvalidJob
from lenspool.extras import needed
from lenspool.interventions import Intervention, Where, steer
from lenspool.readouts import reduce
from lenspool.recipes.runs import CONCURRENCY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lenspool.client import Client, Prompt


@dataclass(frozen=True, eq=False, repr=False)
class SteeringVector:
    """The difference of two means at a hook.

    Attributes
    ----------
    hook
        Canonical name.
    vector
        float32 `[width]`, of a hook with heads `[head, d_head]`: mean row of the positives minus that of the negatives.
    positives, negatives
        float32 `[prompts, ...]`: mean row of each prompt.
    runs, computed
        How many runs it is made of, and how many of them were not in the store.
    """

    hook: str
    vector: np.ndarray
    positives: np.ndarray
    negatives: np.ndarray
    runs: int
    computed: int

    @property
    def norm(self) -> float:
        """L2 norm of the vector."""
        return float(np.linalg.norm(self.vector.astype(np.float64)))

    def steer(
        self,
        coefficient: float = 1.0,
        *,
        relative: float | None = None,
        norm: Literal["preserve", "match"] | None = "preserve",
        **where: Unpack[Where],
    ) -> Intervention:
        """Steer along it, at its own hook; see `lenspool.steer`."""
        return steer(self.hook, self.vector, coefficient=coefficient, relative=relative, norm=norm, **where)

    def projections(self) -> tuple[np.ndarray, np.ndarray]:
        """Component of each prompt's mean row along the vector: `[positives]` and `[negatives]`."""
        unit = self.vector.ravel().astype(np.float64) / (self.norm or 1.0)
        one, other = (
            rows.reshape(len(rows), -1).astype(np.float64) @ unit for rows in (self.positives, self.negatives)
        )
        return one, other

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw where the prompts lie along the vector: how well it tells the two sets apart.

        Raises
        ------
        ImportError
            matplotlib is not installed.
        """
        if ax is None:
            ax = needed("matplotlib.pyplot").subplots(figsize=(6, 2.2), layout="constrained")[1]
        for height, (values, colour) in enumerate(zip(self.projections(), ("tab:blue", "tab:red"), strict=True)):
            ax.scatter(values, np.full(len(values), 1 - height), color=colour, alpha=0.7)
        ax.set_yticks([1, 0], ["positives", "negatives"])
        ax.set(xlabel="component along the vector", title=f"{self.hook}, norm {self.norm:.3g}", ylim=(-0.5, 1.5))
        return ax

    def __repr__(self) -> str:
        sets = f"{len(self.positives)} positives - {len(self.negatives)} negatives"
        made = f"{self.runs} runs, {self.computed} computed"
        return f"<SteeringVector {list(self.vector.shape)} at {self.hook}: norm {self.norm:.4g}, {sets}; {made}>"


async def steering_vector(
    client: Client,
    positives: Iterable[Prompt],
    negatives: Iterable[Prompt],
    hook: str,
    positions: Any = "last",
    *,
    concurrency: int = CONCURRENCY,
) -> SteeringVector:
    """Mean row of the positives minus mean row of the negatives (Rimsky et al. 2023, "Steering Llama 2 via Contrastive
    Activation Addition"; Turner et al. 2023, "Activation Addition").

    The worker computes the means of each prompt. With more than one position every row counts alike, so that a longer
    prompt counts for more.

    Parameters
    ----------
    positives, negatives
        Lists of prompts.
    hook
        One hook.
    positions
        In each prompt.

    Raises
    ------
    InvalidJob
        An argument is wrong.
    """
    names = hk.resolve(hook, await client.card(), "hook")
    if len(names) != 1:
        raise InvalidJob("hook", f"{hook!r} is {len(names)} hooks", "one hook")
    sets = {"positives": positives, "negatives": negatives}
    means, totals, runs, computed = {}, {}, 0, 0
    for field, prompts in sets.items():
        listed = [] if isinstance(prompts, str) else list(prompts)
        if not listed:
            raise InvalidJob(field, f"got {prompts!r}" if isinstance(prompts, str) else "is empty", "a list of prompts")
        rows, counts = [], []
        read = reduce(names[0], "mean")
        async for run in client.map(listed, read, positions=positions, concurrency=concurrency):
            rows.append(run[read])
            counts.append(len(run.positions))
            runs, computed = runs + 1, computed + (not run.cached)
        means[field] = np.stack(rows).astype(np.float32)
        totals[field] = np.average(means[field].astype(np.float64), axis=0, weights=counts)
    vector = (totals["positives"] - totals["negatives"]).astype(np.float32)
    return SteeringVector(names[0], vector, means["positives"], means["negatives"], runs, computed)
