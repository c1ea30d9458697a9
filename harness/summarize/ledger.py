"""The rows of ledger.csv: what `harness.verify.ledger` took, beside what cells and times say."""

from collections.abc import Iterable, Iterator, Mapping

from harness.summarize.timings import EVENTS


def rows(
    reports: Iterable[Mapping], families: Mapping[str, str], measured: Mapping[str, list[Mapping]]
) -> Iterator[dict]:
    """The rows of ledger.csv: a row for each op, implementation, pass and dtype with a right cell.

    measured: raw rows by op. `deterministic` is False where any repeat of a cell gave other bits;
    `timed_by` is `graph`, `events` (no CUDA graph could be captured), or both. A report from before
    there was a ledger leaves the rest empty.
    """
    clocks = _clocks(measured)
    for report in reports:
        entries = {(entry["pass"], entry["dtype"]): entry for entry in report.get("ledger", ())}
        same = {key: report[key] for key in ("op", "impl", "impl_version", "mode")}
        same["family"] = families.get(report["op"], "")
        repeats: dict[tuple[str, str], list[bool | None]] = {}
        for cell in report["cells"]:
            if cell["status"] == "ok":
                key = cell["pass"], cell["dtype"]
                repeats.setdefault(key, []).append(cell.get("deterministic"))
        for (pass_, dtype), found in repeats.items():
            seen = [one for one in found if one is not None]
            entry = dict(entries.get((pass_, dtype), {}))
            entry["kernels"] = "; ".join(
                f"{count} x {name}" for name, count in entry.get("kernels", {}).items()
            )
            entry |= {"pass": pass_, "dtype": dtype}
            entry["deterministic"] = all(seen) if seen else None
            if report["mode"] == "gpu":
                key = report["op"], report["impl"], pass_, dtype
                entry["timed_by"] = " and ".join(sorted(clocks.get(key, ())))
            yield same | entry


def _clocks(measured: Mapping[str, list[Mapping]]) -> dict[tuple, set[str]]:
    """Whether graphs or events timed the cells of an op, implementation, pass and dtype."""
    found: dict[tuple, set[str]] = {}
    for row in (row for rows in measured.values() for row in rows if row["device_us"] is not None):
        key = row["op"], row["impl"], row["pass"], row["dtype"]
        events = (row["reason"] or "").startswith(EVENTS)
        found.setdefault(key, set()).add("events" if events else "graph")
    return found
