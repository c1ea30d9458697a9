"""Loss parity: mean losses in windows of steps, and the band that PyTorch's own seeds give."""

from typing import NamedTuple

import numpy as np

EAGER = "torch_eager"
# Windows into which the steps fall; fewer if they do not divide.
WINDOWS, SEEDS = 12, 3


class Parity(NamedTuple):
    """A comparison by windows.

    Fields:
        steps: the middle of each window.
        centre: mean losses of PyTorch at the first seed.
        width: the range over its seeds, which is the half-width of the band.
        gaps: the mean losses less the centre, by stack.
    """

    steps: np.ndarray
    centre: np.ndarray
    width: np.ndarray
    gaps: dict[str, np.ndarray]

    def outside(self, stack):
        """In how many windows a stack leaves the band; a loss that is no number does."""
        return int((~(np.abs(self.gaps[stack]) <= self.width)).sum())


def parity(rows):
    """Return the comparison in rows of loss_parity.csv; None with fewer than three seeds."""
    rows = rows[rows["status"] == "ok"]
    seeds = rows.loc[rows["stack"] == EAGER, "seed"].unique()
    if len(seeds) < SEEDS:
        return None
    curves = {key: _means(found) for key, found in rows.groupby(["stack", "seed"])}
    centre = curves[EAGER, seeds[0]]
    width = np.ptp([curves[EAGER, seed] for seed in seeds], axis=0)
    steps = (np.arange(len(centre)) + 0.5) * (rows["step"].max() + 1) / len(centre)
    stacks = [name for name in rows["stack"].unique() if name != EAGER]
    gaps = {name: curves[name, seeds[0]] - centre for name in stacks}
    return Parity(steps, centre, width, gaps)


def _means(rows):
    losses = rows.sort_values("step")["loss"].to_numpy()
    windows = next(n for n in range(min(WINDOWS, len(losses)), 0, -1) if len(losses) % n == 0)
    return losses.reshape(windows, -1).mean(axis=1)
