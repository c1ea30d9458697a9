"""Verification of one implementation of one op: `python -m harness.verify --op O --impl I --out F`.

A child process runs the cells, so that one which kills or hangs its process becomes a row. With a
GPU all cases run there. Without one our kernels run their edge cases in Triton's interpreter, and
the baselines run theirs on the CPU. Exit code 1: a kernel of ours is wrong; a baseline that is
wrong is a row of the paper, not an error.
"""

import argparse
import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.command import UserError, run, write_json

OURS = ("ours", "ours_twin")
# From the best to the worst; a report's status is that of its worst cell.
STATUSES = ("ok", "unsupported", "oom", "inaccurate", "hung", "crashed")
# The interpreter of Triton 3.6 computes bfloat16 wrongly, without an error.
INTERPRETED = ("float32", "float16")
HANG_S = 600


@dataclass(frozen=True)
class Plan:
    """What a child process does; `skip` units are done already. A unit is a case in a dtype."""

    op: str
    impl: str
    mode: str
    seed: int
    dtypes: tuple[str, ...]
    passes: tuple[str, ...]
    edge_only: bool
    max_cases: int | None
    skip: int = 0

    @property
    def ours(self) -> bool:
        return self.impl in OURS


def main() -> int:
    arguments = _arguments()
    if arguments.mode == "gpu":
        from harness import lease

        held = lease.hold(exclusive=False)
    else:
        held = contextlib.nullcontext()
    # Only our kernels are interpreted: Inductor's own kernels would break under the variable.
    os.environ.pop("TRITON_INTERPRET", None)
    if arguments.mode == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    plan = Plan(
        **{name: getattr(arguments, name) for name in Plan.__annotations__ if name != "skip"}
    )
    with held:
        report = verify(plan)
    write_json(arguments.out, {"run_id": arguments.run_id} | report)
    print(summary(report))
    return int(plan.ours and report["status"] not in ("ok", "unsupported"))


def verify(plan: Plan) -> dict:
    """Runs the plan in child processes, a new one after each that is lost; returns the report."""
    header, units, cells, done = None, [], [], 0
    while header is None or done < len(units):
        for kind, message in _listen(replace(plan, skip=done)):
            if kind == "error":
                raise UserError(message)
            if kind == "unavailable":
                header = {"impl_version": "", "device": ""}
                return _report(plan, header, [], "unavailable", message)
            if kind == "header":
                header, units = message
            elif kind == "cells":
                cells += message
                done += 1
            elif header is None:
                raise UserError(f"verify: the worker of {plan.op} {plan.impl} {message}; see above")
            else:
                status = "hung" if kind == "hung" else "crashed"
                cells += [row | {"status": status, "reason": message} for row in units[done]]
                done += 1
    status, reason = _overall(cells)
    return _report(plan, header, cells, status, reason)


def summary(report: dict) -> str:
    """One line for each cell that is not ok, and a last one with the count and the verdict."""
    name = f"verify {report['op']} {report['impl']} ({report['mode']})"
    lines = [
        f"{name}: {_cell_name(cell)}: {cell['status']}: {cell['reason']}"
        for cell in report["cells"]
        if cell["status"] != "ok"
    ]
    passed = len(report["cells"]) - len(lines)
    verdict = ": ".join(filter(None, (report["status"], report["reason"])))
    return "\n".join([*lines, f"{name}: {passed} of {len(report['cells'])} cells ok; {verdict}"])


def _listen(plan: Plan) -> Iterator[tuple[str, object]]:
    """The messages of a child process; a last one of kind "hung" or "died" if it is lost."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(theirs, plan), daemon=False)
    child.start()
    theirs.close()
    try:
        while True:
            if not ours.poll(HANG_S):
                yield "hung", f"no result within {HANG_S} s"
                return
            message = ours.recv()
            if message[0] == "end":
                return
            yield message
    except EOFError:
        child.join()
        signal = -child.exitcode
        yield "died", f"ended by signal {signal}" if signal > 0 else f"ended with code {-signal}"
    finally:
        child.kill()
        child.join()


def _work(connection, plan: Plan) -> None:
    """The child process: sends its units, then the cells of each, then "end"."""
    from harness import load, verify_worker

    try:
        verify_worker.work(plan, lambda *message: connection.send(message))
    except load.Unavailable as error:
        connection.send(("unavailable", str(error)))
    except UserError as error:
        connection.send(("error", str(error)))
    connection.send(("end", None))


def _overall(cells: list[dict]) -> tuple[str, str]:
    offered = [cell for cell in cells if cell["status"] != "unsupported"]
    if not cells:
        return "unsupported", "no case in these dtypes and passes"
    worst = max(offered or cells, key=lambda cell: (STATUSES.index(cell["status"]), _ratio(cell)))
    if worst["status"] == "ok":
        return "ok", ""
    return worst["status"], f"{_cell_name(worst)}: {worst['reason']}"


def _report(plan: Plan, header: dict, cells: list[dict], status: str, reason: str) -> dict:
    identity = {"op": plan.op, "impl": plan.impl, "mode": plan.mode, "seed": plan.seed}
    return identity | header | {"status": status, "reason": reason, "cells": cells}


def _ratio(cell: dict) -> float:
    """The worst ratio of a cell; null stands for one that is not finite."""
    ratios = [tensor["ratio"] for tensor in cell["tensors"]]
    return float("inf") if None in ratios else max(ratios, default=0.0)


def _cell_name(cell: dict) -> str:
    return f"{cell['case']} {cell['dtype']} {cell['pass']}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="harness.verify", description=__doc__.split("\n")[0])
    parser.add_argument("--op", required=True)
    parser.add_argument("--impl", required=True, help="ours, or the stem of a baseline's file")
    parser.add_argument("--out", required=True, help="the report, JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtypes", type=_names, nargs="+", default=[("float32", "float16")])
    parser.add_argument("--passes", type=_names, nargs="+", default=[("forward", "backward")])
    parser.add_argument("--max-cases", type=int, help="so many edge cases and so many of the sweep")
    parser.add_argument("--edge-only", action="store_true")
    parser.add_argument("--run-id", default="")
    arguments = parser.parse_args()
    arguments.dtypes = tuple(name for names in arguments.dtypes for name in names)
    arguments.passes = tuple(name for names in arguments.passes for name in names)

    from harness import discover

    if discover.gpus():
        arguments.mode = "gpu"
        return arguments
    arguments.mode = "interpreter" if arguments.impl in OURS else "cpu"
    arguments.edge_only = True
    # A study of bfloat16 alone is still verified where there is no GPU, in float32.
    interpreted = [dtype for dtype in arguments.dtypes if dtype in INTERPRETED]
    arguments.dtypes = tuple(interpreted or INTERPRETED[:1])
    return arguments


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


if __name__ == "__main__":
    run(main)
