"""The child process of the verification: all cells of one implementation, one after the other."""

from collections.abc import Callable, Iterator

import torch

from harness import load, oracle
from harness.command import UserError
from kernels._contract import Case, Op

EAGER = "torch_eager"


def work(plan, send: Callable[[str, object], None]) -> None:
    """Sends ("header", (header, units)), then ("cells", rows) for each unit that is not done yet.

    A unit is a case in a dtype, its rows one for each pass. Ends early where the GPU's context is
    lost: a new process must take the units that are left.
    """
    op, _ = load.op(plan.op)
    function = load.function(plan.op, plan.impl)
    device = "cuda" if plan.mode == "gpu" else "cpu"
    units = list(_units(op, plan))
    passes = [direction for direction in plan.passes if direction in op.passes]
    blanks = [
        [
            {"case": case.name, "dtype": dtype, "pass": direction, "kind": kind}
            | {"status": "ok", "reason": "", "tensors": []}
            for direction in passes
        ]
        for kind, case, dtype in units
    ]
    header = {
        "impl_version": load.version(plan.impl),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    send("header", (header, blanks))
    eager = _eager(op)
    for (_, case, dtype), rows in list(zip(units, blanks, strict=True))[plan.skip :]:
        try:
            problem = oracle.problem(op, case, dtype, plan.seed, device, eager)
        except Exception as error:
            lost = _fault(error, ours=True)
            rows = [row | lost | {"reason": f"oracle: {lost['reason']}"} for row in rows]
        else:
            rows = [row | _cell(function, problem, row["pass"], plan.ours) for row in rows]
            del problem
        send("cells", rows)
        if device == "cuda":
            if not _context_lives():
                return
            torch.cuda.empty_cache()


def _units(op: Op, plan) -> Iterator[tuple[str, Case, str]]:
    for kind in ("edge",) if plan.edge_only else ("edge", "sweep"):
        for case in getattr(op, kind)[: plan.max_cases]:
            for dtype in op.dtypes_of(case):
                if dtype in plan.dtypes:
                    yield kind, case, dtype


def _eager(op: Op) -> Callable:
    try:
        return load.function(op.name, EAGER)
    except (load.Unavailable, UserError):
        return op.reference


def _cell(function: Callable, problem: oracle.Problem, direction: str, ours: bool) -> dict:
    try:
        reason, tensors = oracle.check(function, problem, direction, ours)
    except Exception as error:
        return _fault(error, ours)
    return {"status": "inaccurate" if reason else "ok", "reason": reason, "tensors": tensors}


def _fault(error: Exception, ours: bool) -> dict[str, str]:
    if isinstance(error, torch.OutOfMemoryError):
        status = "oom"
    elif ours or not _context_lives():
        status = "crashed"
    else:
        status = "unsupported"
    return {"status": status, "reason": _first_line(error)}


def _first_line(error: Exception) -> str:
    """The first line of the message, and the next where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _context_lives() -> bool:
    """False after an illegal access: from then on each call of this process fails."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
