"""Have Triton's tuners compile one of their candidates at a time.

A function under `triton.autotune` compiles all of its candidates in its first call with a shape,
one after the other. Several processes, each with a candidate of its own, compile them side by side.
The compiled kernels of all lie in one folder.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator

from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources, PTXASError

# By these a tuner leaves a candidate out.
UNFIT = OutOfResources, CompileTimeAssertionFailure, PTXASError


@contextlib.contextmanager
def only(candidate: int | None) -> Iterator[list[int]]:
    """Meanwhile each tuner meets one candidate: that of this number, or its last one.

    candidate: from 0; None for the last one, which a tuner with fewer candidates takes as well. If
    it does not fit the GPU, the next one that does takes its place, for the sake of what follows.
    Choices that a tuner of this process has made before do not count, and none of these stays.

    Yields the numbers of candidates of the tuners, as they meet their shapes.
    """
    counts: list[int] = []
    met: set[Autotuner] = set()
    left_out: Counter[Autotuner] = Counter()
    run, prune = Autotuner.run, Autotuner.prune_configs

    def run_afresh(tuner, *arguments, **options):
        if tuner not in met:
            met.add(tuner)
            tuner.cache.clear()
        while True:
            try:
                return run(tuner, *arguments, **options)
            except UNFIT:
                left_out[tuner] += 1
                if left_out[tuner] >= len(tuner.configs):
                    raise
                tuner.cache.clear()

    def one_of(tuner, options):
        found = prune(tuner, options)
        counts.append(len(found))
        last = len(found) - 1
        number = last if candidate is None else min(candidate, last)
        return [found[(number + left_out[tuner]) % len(found)]]

    Autotuner.run, Autotuner.prune_configs = run_afresh, one_of
    try:
        yield counts
    finally:
        Autotuner.run, Autotuner.prune_configs = run, prune
        for tuner in met:
            tuner.cache.clear()
