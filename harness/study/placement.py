"""Decides which GPU each job that times has, so that the jobs of a study spread over all of them.

All jobs of an op have one GPU: its libraries tune themselves on the board that measures them, and
its rivals share it. So the GPU of an op is fixed before its first job. A plan takes the jobs by
their length, the longest first, and gives each to the GPU with the least work so far. It depends on
the jobs, their lengths and the GPUs, and not on the jobs that are done. So an interrupted study
finds each op where it was.

Source: Graham, "Bounds on multiprocessing timing anomalies" (1969).
"""

import sys
from collections.abc import Iterable, Mapping, Sequence

from harness.machine import gpu_lock, nvml


def usable() -> list[str]:
    """Return the UUIDs of the GPUs that jobs may have, and print why others are left out.

    With several visible GPUs, one is left out that is of another model than the first, that is a
    further slice of a board, or that another program uses. If programs use all of them, all stay:
    the jobs name the programs.
    """
    visible = nvml.gpus()
    boards = nvml.boards(visible)
    for gpu in visible:
        if gpu.name != visible[0].name:
            _say(gpu, f"is left out, because {visible[0]} is of another model")
        elif gpu not in boards:
            _say(gpu, f"slice {gpu.uuid} is left out, because slices share a clock")
    if len(boards) < 2:
        return [gpu.uuid for gpu in boards]
    used = {gpu: found for gpu in boards if (found := gpu_lock.strangers(gpu))}
    if len(used) == len(boards):
        return [gpu.uuid for gpu in boards]
    for gpu, found in used.items():
        _say(gpu, f"is left out, because {found[0]} is using it")
    return [gpu.uuid for gpu in boards if gpu not in used]


def plan(
    jobs: Iterable[str],
    lengths: Mapping[str, float],
    boards: Sequence[str],
    later: Iterable[str] = (),
) -> dict[str, str]:
    """Return the board of each job; {} if there is no board.

    - lengths: the seconds that jobs took before. A job of unknown length counts as the longest: one
      that is placed first can be shorter, and the others still fill up the gap.
    - later: jobs that a run may not ask for. They are placed after all others, and so they keep
      none of them away from an idle GPU.
    """
    if not boards:
        return {}
    longest = max(lengths.values(), default=1.0)
    load = dict.fromkeys(boards, 0.0)
    found = {}
    for some in (jobs, later):
        length = {job: lengths.get(job, longest) for job in some}
        for job in sorted(length, key=lambda job: (-length[job], job)):
            found[job] = min(boards, key=load.__getitem__)
            load[found[job]] += length[job]
    return found


def _say(gpu: nvml.Gpu, words: str) -> None:
    print(f"tilewright: {gpu} {words}", file=sys.stderr)
