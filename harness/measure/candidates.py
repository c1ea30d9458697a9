"""Have Triton's tuners compile one of their candidates at a time.

A function under `triton.autotune` compiles all of its candidates in its first call with a shape,
one after the other. Several processes, each with a candidate of its own, compile them side by side.
The compiled kernels of all lie in one folder.
"""

import contextlib
from collections.abc import Iterator

from triton.runtime.autotuner import Autotuner


@contextlib.contextmanager
def only(candidate: int | None) -> Iterator[list[int]]:
    """Meanwhile each tuner meets one candidate: that of this number, or its last one.

    candidate: from 0; None for the last one, which a tuner with fewer candidates takes as well.
    Choices that a tuner of this process has made before do not count.

    Yields the numbers of candidates of the tuners, as they meet their shapes.
    """
    counts: list[int] = []
    met: set[Autotuner] = set()
    run, prune = Autotuner.run, Autotuner.prune_configs

    def run_afresh(tuner, *arguments, **options):
        if tuner not in met:
            met.add(tuner)
            tuner.cache.clear()
        return run(tuner, *arguments, **options)

    def one_of(tuner, options):
        found = prune(tuner, options)
        counts.append(len(found))
        last = len(found) - 1
        return [found[last if candidate is None else min(candidate, last)]]

    Autotuner.run, Autotuner.prune_configs = run_afresh, one_of
    try:
        yield counts
    finally:
        Autotuner.run, Autotuner.prune_configs = run, prune
