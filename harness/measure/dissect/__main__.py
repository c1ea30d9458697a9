"""Takes a training step, or the forms of a kernel, apart and writes one CSV file.

`python -m harness.measure.dissect step_parts --preset llama-1b --out FILE`
`python -m harness.measure.dissect matmul_ladder --cells M8192-N8192-K8192.forward --out FILE`

With a GPU it locks it and runs there. Without one it runs on the CPU, ours in Triton's interpreter:
a preset of a GPU takes hours there, `tiny` some seconds.
"""

import argparse
import contextlib
import csv
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from harness import cli, files
from harness.machine import environment, gpu_lock, nvml
from harness.results import columns

ROOT = Path(__file__).resolve().parents[3]
KERNELS = [table.name for table in columns.LADDERS]
# The columns by which the log tells how far a question is.
TOLD = ("case", "pass", "impl", "stack", "length", "seed", "rung")
Row = dict[str, object]
STACKS = ("torch_eager", "torch_compile", "liger", "ours")


def main() -> None:
    options = _options()
    with _place(options.board) as gpu:
        # An edit that is made meanwhile is not in the rows.
        taken = _taken(gpu)
        rows = list(_told(options.subject, _rows(options, gpu is not None)))
    write(options.out, columns.DISSECTED[options.subject], (row | taken for row in rows))
    print(f"dissect {options.subject}: {len(rows)} rows")


@contextlib.contextmanager
def _place(board: str | None) -> Iterator[nvml.Gpu | None]:
    """Lock a GPU, or set Triton's interpreter; before torch and Triton are imported."""
    if not nvml.gpus():
        os.environ["TRITON_INTERPRET"] = "1"
        yield None
        return
    with gpu_lock.hold(exclusive=True, uuid=board) as gpu:
        yield gpu


def _taken(gpu: nvml.Gpu | None) -> dict[str, str]:
    """Return the columns that tell where and of which code the rows were taken."""
    commit, dirty = environment.revision(ROOT)
    name, board = (gpu.name, gpu.uuid) if gpu else ("", "")
    return {"gpu": name, "board": board, "commit": commit + environment.DIRTY * dirty}


def _told(subject: str, rows: Iterable[Row]) -> Iterator[Row]:
    """Pass rows on, and tell the log of each group of equal TOLD as its first row comes."""
    began, told = time.monotonic(), set()
    for row in rows:
        about = " ".join(f"{key} {row[key]}" for key in TOLD if row.get(key) not in (None, ""))
        if about not in told:
            told.add(about)
            spent = time.monotonic() - began
            print(f"dissect {subject}: {about}: {row['status']}, {spent:.0f} s", flush=True)
        yield row


def _rows(options: argparse.Namespace, gpu: bool) -> Iterator[Row]:
    from harness.calls import interpreter
    from harness.measure.dissect import power, subjects
    from harness.measure.dissect.steps import Steps

    if not gpu:
        interpreter.amend()
    given, dtype = options, options.dtype
    if given.cells:
        from harness.measure.dissect import ladders

        op, about = given.subject.removesuffix(columns.LADDER), (given.times, given.seed)
        yield from ladders.kernel_ladder(op, given.cells, dtype, given.rivals, *about)
    elif given.subject == "step_memory":
        yield from subjects.step_memory(
            given.preset, given.lengths, given.stacks, dtype, gpu, given.times
        )
    elif given.subject == "loss_parity":
        yield from subjects.loss_parity(
            given.preset, given.batch, given.length, given.steps, given.stacks, dtype, gpu
        )
    else:
        steps = Steps(given.preset, given.batch, given.length, dtype, gpu)
        if given.subject == "step_parts":
            yield from subjects.step_parts(steps, given.stacks, given.times)
        elif given.subject == "parts_alone":
            yield from subjects.parts_alone(steps, given.times)
        elif given.subject == "step_power":
            yield from power.step_power(steps, given.stacks, given.times)
        else:
            yield from subjects.step_ladder(steps, given.over, given.times, given.seed)


def write(out: Path, table: columns.Table, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows as the CSV file of a table; KeyError for a column that it has not."""
    with files.whole_file(out) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, table.header, restval="", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _text(value) for key, value in row.items()})


def _text(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="harness.measure.dissect", description=__doc__.split("\n")[0]
    )
    parser.add_argument("subject", choices=sorted(columns.DISSECTED))
    parser.add_argument("--preset", help="of the network that a step trains")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--stacks", nargs="+", default=list(STACKS))
    parser.add_argument("--over", default=STACKS[0], help="the stack at the foot of the ladder")
    parser.add_argument("--times", type=int, default=5, help="repeats of a time, blocks, or steps")
    parser.add_argument("--steps", type=int, default=300, help="steps of training")
    parser.add_argument("--lengths", type=int, nargs="+", default=[], help="of step_memory")
    parser.add_argument("--seed", type=int, default=0, help="of the order in the ladder")
    parser.add_argument("--cells", nargs="+", default=[], help="of the ladder of a kernel")
    parser.add_argument("--rivals", nargs="+", default=[], help="baselines beside that ladder")
    parser.add_argument("--board", type=gpu_lock.named, help="UUID of the GPU, or any")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wanted = "cells" if options.subject in KERNELS else "preset"
    if not getattr(options, wanted):
        parser.error(f"{options.subject} needs --{wanted}")
    return options


if __name__ == "__main__":
    cli.run(main)
