"""When a cell has been timed for long enough."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from harness import stats
from harness.project.implementations import OURS, TWIN, is_ours


@dataclass(frozen=True)
class Timing:
    """How long each cell is timed: the keys of `timing` in config.yaml.

    At least `min_blocks` blocks, then until the 95 % interval of the paired ratio reaches less than
    `interval` (a fraction) to either side, or for `max_blocks` blocks or `cell_cap_s` seconds.

    - block_ms: GPU time of an implementation in a block.
    - energy_ms: length of the window in which the energy of a call is measured, for energy_impls
      and calls that move more than the L2 holds; 0 for none.
    - cell_timeout_s: the longest wait for one answer of a worker.
    - cell_limit_s: for all its blocks in a cell and its energy together.
    - processes: how many run each implementation in a cell whose shortest call takes less than
      short_us, or whose op searches a table; elsewhere one does.
    """

    min_blocks: int
    max_blocks: int
    interval: float
    cell_cap_s: float
    block_ms: float
    energy_ms: float
    energy_impls: Sequence[str]
    cell_timeout_s: float
    cell_limit_s: float
    processes: int
    short_us: float


class Rule:
    """Decides after each block of one cell whether it was the last.

    It looks at the width of the interval alone. A rule that looked at the ratio would stop where
    chance happens to favour one side (optional stopping), and so favour it in the result.
    """

    def __init__(self, timing: Timing, impls: Sequence[str]):
        self._timing = timing
        # Ours is compared with the first baseline that has times, or with itself.
        rivals = [impl for impl in impls if not is_ours(impl)]
        self._rivals = [*rivals, *(impl for impl in impls if impl == TWIN)]
        self._times: dict[str, dict[int, float]] = defaultdict(dict)

    def timed(self, impl: str, block: int, device_us: float) -> None:
        self._times[impl][block] = device_us

    def stop(self, running: Sequence[str], blocks: int, elapsed_s: float) -> str:
        """Why to stop after so many blocks and seconds: "" to go on, else a key of `REASONS`.

        running: the implementations that can still be timed.
        """
        if not running:
            return "lost"
        if blocks < self._timing.min_blocks:
            return ""
        rival = next((impl for impl in self._rivals if impl in running), None)
        if OURS not in running or rival is None:
            return "alone"
        if self._half_width(rival) < self._timing.interval:
            return "interval"
        if blocks >= self._timing.max_blocks:
            return "blocks"
        return "time" if elapsed_s >= self._timing.cell_cap_s else ""

    def _half_width(self, rival: str) -> float:
        ours, theirs = self._times[OURS], self._times[rival]
        shared = sorted(set(ours) & set(theirs))
        ratio = stats.paired_ratio([theirs[b] for b in shared], [ours[b] for b in shared])
        return (ratio.hi - ratio.lo) / 2 / ratio.value


REASONS = {
    "interval": "the interval is narrow enough",
    "blocks": "as many blocks as allowed",
    "time": "as much time as allowed",
    "alone": "nothing is left to compare",
    "lost": "nothing could be timed",
}
