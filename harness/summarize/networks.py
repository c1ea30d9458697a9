"""Tell of a network's calls what its user asks: tokens a second, MFU, memory, energy of a token.

Each call has two times. The wall time is what its caller waits for, the host's work included. The
GPU time lacks that work: the host submits the call while the GPU is still flushing its cache. A
network of short kernels is bound by the host, and its GPU time is that of no user. So tokens a
second, MFU and speedup follow from the wall time, and the GPU time has a ratio of its own.

The MFU is the FLOPs of the model (`network.cost`) over the time and the peak rate of the dtype. The
peak is that of the data sheet, as in Chowdhery et al., "PaLM" (2022); without one, the rate that
was measured.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from harness import stats
from harness.project.implementations import TWIN
from harness.results import columns, csv_rows, manifest
from harness.stats import Interval
from harness.summarize import timings

EAGER = "torch_eager"
SHEET = "data sheet"
BY_HOST = "the host launches each kernel"


def call_times(raw: Iterable[timings.Row]) -> dict[tuple, Interval]:
    """Return the wall time of a call in µs by (op, case, dtype) and stack.

    It is the median over blocks, with the 95 % interval that their scatter alone gives. The summary
    has the least of the blocks. That is the host's best case, and no partner of a median. A cell
    without such a time, or that a failure ended, is left out.

    Args:
        raw: rows as `harness.results.raw` reads them.
    """
    return {
        (*key[:3], stack): _over_blocks(times)
        for key, stacks in timings.group(raw).items()
        for stack, cell in stacks.items()
        if (times := list(cell.times("call_us").values()))
    }


def remarks(raw: Iterable[timings.Row]) -> dict[tuple, list[str]]:
    """Return the parts of the remark on a call by (op, case, dtype) and stack, but the first.

    The first says why events time it; `harness.measure.parked_worker` has the others.

    Args:
        raw: rows as `harness.results.raw` reads them.
    """
    found = {}
    for row in raw:
        remark, *more = (row["reason"] or "").split("; ")
        if remark.startswith(timings.EVENTS):
            found[row["op"], row["case"], row["dtype"], row["impl"]] = more
    return found


def _remarked(parts: list[str] | None) -> dict:
    """The columns that a remark tells; without one none is known.

    A remark of a former run says less: no graph was captured then, and no call came long before.
    """
    if parts is None:
        return {"launched": ""}
    starts = [part for part in parts if part != columns.SUSTAINED]
    return {"launched": "; ".join(starts) or BY_HOST, "sustained": columns.SUSTAINED in parts}


def _over_blocks(times: list[float]) -> Interval:
    found = stats.around(np.median(times), stats.log_median(times))
    return Interval(*map(float, found))


def rows(
    summary: Iterable[Mapping],
    ceilings: Mapping[tuple[str, str], list[Mapping]],
    calls: Mapping[tuple, Interval],
    said: Mapping[tuple, list[str]],
) -> Iterator[dict]:
    """Yield a row of `columns.NETWORK` for each row of the summary on an op of a network.

    Args:
        summary: rows of `columns.SUMMARY`; those of other ops are left out.
        ceilings: by op of a network and run, the rates of the machine that timed it there, with
            their sources.
        calls: as `call_times` returns them. All that follows from the wall time is absent from a
            row without one.
        said: as `remarks` returns them.
    """
    ops = {op for op, _ in ceilings}
    found = [row for row in summary if row["op"] in ops and row["impl"] != TWIN]
    eager = {_cell(row): row.get("device_us") for row in found if row["impl"] == EAGER}
    for row in found:
        cell, made = _cell(row), _about(row)
        made |= _remarked(said.get((*cell, row["impl"])))
        if row.get("device_us"):
            made |= _on_gpu(row, made["tokens"], eager.get(cell))
            if call := calls.get((*cell, row["impl"])):
                rates = ceilings[row["op"], row["run_id"]]
                made |= _as_called(row, made["tokens"], rates, call, calls.get((*cell, EAGER)))
        yield made


def _cell(row: Mapping) -> tuple[str, str, str]:
    return row["op"], row["case"], row["dtype"]


def _about(row: Mapping) -> dict:
    batch, length, decoded = (row.get(f"size_{letter}") for letter in "BST")
    made = {name: row[name] for name in ("op", "case", "dtype", "status", "reason")}
    made |= {"stack": row["impl"], "preset": row["flags"].replace("_", "-")}
    return made | {"batch": batch, "length": length, "tokens": batch * (decoded or length)}


def _on_gpu(row: Mapping, tokens: int, eager_us: float | None) -> dict:
    """The columns that follow from the GPU time, and the readings beside it."""
    us = row["device_us"]
    made = {"device_us": us, "device_lo": row["ci_lo"], "device_hi": row["ci_hi"]}
    if "peak_mem_bytes" in row:
        made["peak_mem_bytes"] = row["peak_mem_bytes"]
    if row.get("energy_uj"):
        made["energy_mj_per_token"] = row["energy_uj"] / 1e3 / tokens
    if eager_us:
        made["device_speedup_vs_eager"] = eager_us / us
    return made


def _as_called(
    row: Mapping, tokens: int, rates: list[Mapping], call: Interval, eager: Interval | None
) -> dict:
    """The columns that follow from the wall time."""
    us = call.value
    made = {"call_us": us, "call_lo": call.lo, "call_hi": call.hi}
    made["tokens_per_s"] = tokens / us * 1e6
    if peak := _peak(rates, row["dtype"]):
        # The rate of the summary is that over the GPU time.
        tflops = row["tflops"] * row["device_us"] / us
        made |= {"mfu": tflops / peak["value"], "peak": peak["source"]}
    if eager:
        made["speedup_vs_eager"] = eager.value / us
    return made


def _peak(rates: list[Mapping], dtype: str) -> Mapping | None:
    """The rate of a dtype by the data sheet, else as it was measured."""
    found = [rate for rate in rates if rate["quantity"] == dtype]
    sheets = [rate for rate in found if rate["source"].startswith(SHEET)]
    return next(iter([*sheets, *found]), None)


def dissected(folder: Path, recorded: Path | None, table: columns.Table) -> list[dict[str, str]]:
    """Return the rows of a file of `harness.measure.dissect`: of the run, else as recorded.

    There are none if neither has the file.

    Raises UserError if it is no whole file of the table.
    """
    places = [place / "dissect" / f"{table.name}.csv" for place in (folder, recorded) if place]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return []
    if recorded is not None and path.is_relative_to(recorded):
        manifest.check_file(recorded, f"dissect/{path.name}")
    again = f"remove it, or make it again: python -m harness.measure.dissect {table.name}"
    return csv_rows.read(path, table, again)
