"""Mean, deviation and norms of rows that come one batch at a time."""

from __future__ import annotations

import numpy as np


class Statistics:
    """Of all rows so far, in float64.

    Batches are joined by the pairwise form of Welford's method (Chan, Golub & LeVeque 1983, "Algorithms for computing
    the sample variance"), so that nothing cancels where the mean is large.

    Attributes
    ----------
    count
        Rows.
    mean
        float64 `[width]`.
    mean_norm
        Mean Euclidean norm of the rows.
    rms_norm
        Root of the mean squared norm.
    """

    def __init__(self, width: int) -> None:
        self.count = 0
        self.mean = np.zeros(width)
        self.mean_norm = 0.0
        self._squares = np.zeros(width)
        self._norm_squares = 0.0

    def add(self, rows: np.ndarray) -> None:
        """Take rows `[rows, width]` in."""
        n = len(rows)
        if not n:
            return
        values = rows.astype(np.float64)
        mean = values.mean(0)
        norms = np.linalg.norm(values, axis=1)
        total = self.count + n
        delta = mean - self.mean
        self._squares += ((values - mean) ** 2).sum(0) + delta**2 * (self.count * n / total)
        self.mean = self.mean + delta * (n / total)
        self.mean_norm += (float(norms.mean()) - self.mean_norm) * (n / total)
        self._norm_squares += float((norms**2).sum())
        self.count = total

    @property
    def std(self) -> np.ndarray:
        """float64 `[width]`: standard deviation of each number over the rows (divided by their count)."""
        return np.sqrt(self._squares / max(self.count, 1))

    @property
    def rms_norm(self) -> float:
        """See the class."""
        return float(np.sqrt(self._norm_squares / max(self.count, 1)))

    def __repr__(self) -> str:
        return (
            f"<Statistics of {self.count} rows of {len(self.mean)}: norm {self.mean_norm:.4g} "
            f"(rms {self.rms_norm:.4g}), std {float(np.sqrt((self.std**2).mean())):.4g}>"
        )
