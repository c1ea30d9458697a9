"""Recompute the numbers of the abstract and of the closest table from raw rows by other code.

The expected values are computed in plain Python, without the harness and the paper's scripts. The
made-up ratios lie on both sides of each bound, in both passes.
"""

import csv
import itertools
import json
import math
import re
import statistics

import pytest

from harness.summarize.__main__ import summarize
from tests.support import synthetic
from tests.support.paper_scripts import PAPER, call, numbers, script

OPS = ("softmax", "matmul", "attention", "swiglu")
# Time of the fastest rival over ours; the slowest takes 1.7 times as long.
RATIOS = (0.93, 1.21, 0.42, 1.004, 0.96, 2.3, 0.7, 1.08, 0.945, 1.6, 0.999)
EVENTS = "events: the host takes part"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = synthetic.write_run(tmp_path_factory.mktemp("abstract"), OPS)
    # Each ratio grows a little, so that no two cells are equal.
    turn = (ratio * (1 + 2e-5 * n) for n, ratio in enumerate(itertools.cycle(RATIOS)))
    for op in OPS:
        found = {}
        for row in csv.DictReader((folder / "raw" / f"{op}.csv").open(newline="")):
            found.setdefault((row["case"], row["dtype"], row["pass"]), []).append(row)
        rows = []
        for cell in found.values():
            ours = {
                row["block"]: 4 * float(row["device_us"]) for row in cell if row["impl"] == "ours"
            }
            ratio = next(turn)
            fastest, slowest = ("torch_eager", "torch_compile")[:: 1 if ratio > 1 else -1]
            for row in cell:
                # Such a rival would be the fastest, but events timed it, so it does not count.
                factor = 0.35
                if row["impl"] in ("ours", "ours_twin"):
                    factor = 4 * float(row["device_us"]) / ours[row["block"]]
                elif row["impl"] in (fastest, slowest):
                    factor = ratio if row["impl"] == fastest else 1.7 * ratio
                elif row["device_us"]:
                    row["reason"] = EVENTS
                if row["device_us"]:
                    row["device_us"] = f"{factor * ours[row['block']]:.4f}"
                rows.append(row)
        synthetic.write_raw(folder, op, rows)
    summarize(folder, folder / "recorded")
    assert call("claims.py", folder, folder / "numbers.tex").returncode == 0
    script(PAPER / "tables" / "closest.py", folder, folder / "tables" / "closest.tex")
    return folder


@pytest.fixture(scope="module")
def cells(every):
    """Return the cells of means over ops: swiglu has a backward pass, so its `both` is training."""
    assert any(key[0] == "swiglu" and key[3] == "backward" for key in every)
    return {key: cell for key, cell in every.items() if key[::3] != ("swiglu", "both")}


@pytest.fixture(scope="module")
def training(cells, every):
    return [cell for key, cell in every.items() if key not in cells]


@pytest.fixture(scope="module")
def every(run):
    """Return the ratio to the fastest rival timed by graphs, and more, for each cell."""
    found = {}
    for op in OPS:
        limits = {
            row["quantity"]: row["value"]
            for row in json.loads((run / "raw" / f"{op}.json").read_text())["ceilings"]
        }
        rows = list(csv.DictReader((run / "raw" / f"{op}.csv").open(newline="")))
        keys = {(row["op"], row["case"], row["dtype"], row["pass"]) for row in rows}
        for key in keys:
            mine = [
                row for row in rows if (row["op"], row["case"], row["dtype"], row["pass"]) == key
            ]
            times = {}
            for row in mine:
                if row["device_us"] and not row["reason"].startswith("events"):
                    times.setdefault(row["impl"], {})[row["block"]] = float(row["device_us"])
            ours, ratios = times["ours"], {}
            for impl in set(times) - {"ours", "ours_twin"}:
                ratios[impl] = statistics.median(times[impl][b] / ours[b] for b in times[impl])
            if not ratios:
                continue
            read, written, flops = (
                float(mine[0][name]) for name in ("bytes_read", "bytes_written", "flops")
            )
            memory = read / limits["read"] / 1e3 + written / limits["write"] / 1e3
            found[key] = {
                "ratio": min(ratios.values()),
                "rival": min(ratios, key=ratios.get),
                "memory": flops / limits[key[2]] / 1e6 <= memory,
                "mib": (read + written) / 2**20,
            }
    return found


def mean(cells):
    return math.exp(statistics.fmean(math.log(cell["ratio"]) for cell in cells))


def of(cells, *ops):
    return [cell for key, cell in cells.items() if key[0] in ops]


def test_the_made_up_ratios_can_tell_rules_apart(cells):
    memory = [cell for cell in cells.values() if cell["memory"]]
    large = [key for key, cell in cells.items() if cell["memory"] and cell["mib"] >= 64]
    below = [key for key in large if cells[key]["ratio"] < 0.95]
    assert 0 < len(memory) < len(cells) and 0 < len(large) < len(memory)
    assert {key[3] for key in below} == {"forward", "backward"}
    assert any(cells[key]["ratio"] < 0.5 for key in below)
    assert any(0.5 < cells[key]["ratio"] < 0.94 for key in below)
    assert any(0.94 < cells[key]["ratio"] < 0.95 for key in below)
    assert any(0.95 < cells[key]["ratio"] < 0.97 for key in large)
    assert 0 < len(below) < len(large) and len(below) != len(large) - len(below)


def test_the_abstract_says_what_the_raw_rows_say(run, cells, training):
    every = list(cells.values())
    memory = [cell for cell in every if cell["memory"]]
    large = [cell for cell in memory if cell["mib"] >= 64]
    expected = {
        "closest": f"{mean(every):.3f}",
        "closest_cells": str(len(every)),
        "closest_median": f"{statistics.median(cell['ratio'] for cell in every):.3f}",
        "memory_closest": f"{mean(memory):.3f}",
        "memory_cells": str(len(memory)),
        "matmul_closest": f"{mean(of(cells, 'matmul')):.3f}",
        "attention_closest": f"{mean(of(cells, 'attention')):.3f}",
        "large_cells": str(len(large)),
        "large_below": str(sum(cell["ratio"] < 0.95 for cell in large)),
        "large_least": f"{min(cell['ratio'] for cell in large):.3f}",
        "training_cells": str(len(training)),
        "training_closest": f"{mean(training):.3f}",
        "training_median": f"{statistics.median(cell['ratio'] for cell in training):.3f}",
    }
    assert training
    found = numbers(run)
    assert {key: found[key] for key in expected} == expected


def test_verdicts_of_the_abstract_are_counted_over_graphs(run):
    rows = list(csv.DictReader((run / "claims.csv").open(newline="")))
    found = numbers(run)
    names = {
        "better": "better",
        "worse": "worse",
        "same": "no difference",
        "undecided": "undecided",
    }
    parts = {"best": ("best", False), "claims": ("each", False), "training_best": ("best", True)}
    for key, (against, both) in parts.items():
        chosen = [r for r in rows if r["against"] == against and r["timed_by"] == "graph"]
        chosen = [r for r in chosen if (r["pass"] == "both") == both]
        assert chosen
        assert found[key] == str(len(chosen))
        for short, verdict in names.items():
            assert found[f"{key}_{short}"] == str(sum(r["verdict"] == verdict for r in chosen))
    events = [r for r in rows if r["timed_by"] == "events" and r["pass"] != "both"]
    assert events and all(r["baseline"] not in ("torch_eager", "torch_compile") for r in events)
    assert found["claims_events"] == str(len(events))
    verdicts = list(csv.DictReader((run / "verdicts.csv").open(newline="")))
    verdicts = [row for row in verdicts if row["pass"] != "both"]
    assert found["comparisons_events"] == str(sum(r["timed_by"] == "events" for r in verdicts))
    assert int(found["comparisons"]) + int(found["comparisons_events"]) == len(verdicts)


def test_the_closest_table_says_what_the_raw_rows_say(run, cells, every, training):
    text = (run / "tables" / "closest.tex").read_text().replace(r"\allowbreak{}", "")
    lines = [
        line.split(" & ") for line in text.splitlines() if line.endswith(r" \\") and "&" in line
    ]
    last, seen = "", set()
    for line in lines:
        op = re.search(r"\\texttt\{(\w+)\}", line[0])
        last = op[1] if op else last
        if len(line) < 10 or line[1] not in ("forward", "backward", "both"):
            continue
        mine = {key: cell for key, cell in every.items() if (key[0], key[3]) == (last, line[1])}
        worst = min(mine, key=lambda key: mine[key]["ratio"])
        assert line[2:4] == [str(len(mine)), f"{mean(mine.values()):.3f}"]
        assert line[8] == f"{mine[worst]['ratio']:.3f}"
        assert f"{mine[worst]['rival']}".replace("_", r"\_") in line[10]
        assert worst[1] in line[9]
        assert sum(map(int, line[4:8])) == len(mine)
        seen.add((last, line[1]))
    assert seen == {(key[0], key[3]) for key in every}
    sums = {
        "all": list(cells.values()),
        "bound by memory": [cell for cell in cells.values() if cell["memory"]],
        "64 MiB or more": [c for c in cells.values() if c["memory"] and c["mib"] >= 64],
        "training, in none of these": training,
    }
    for title, chosen in sums.items():
        line = next(line for line in text.splitlines() if title + "}" in line).split(" & ")
        assert line[1:3] == [str(len(chosen)), f"{mean(chosen):.3f}"]
        assert line[7] == f"{min(cell['ratio'] for cell in chosen):.3f}"


def test_ops_without_another_library_are_told_with_and_without(run, cells):
    out = script(PAPER / "tables" / "alone.py", run, run / "tables" / "alone.tex").read_text()
    # Only attention has rivals from other libraries here, and events timed those.
    rest = [cell for key, cell in cells.items() if key[0] == "attention"]
    assert (
        f"without their {len(cells) - len(rest)}~cells the mean over all is {mean(rest):.3f}" in out
    )
