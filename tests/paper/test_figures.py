"""Check the code that figures share: colours, bands, marks and legends."""

import runpy
from pathlib import Path

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.patches import Polygon

from harness.status import STATUSES

PAPER = Path(__file__).resolve().parents[2] / "paper"
FIGURE = runpy.run_path(str(PAPER / "figures" / "_figure.py"))


def test_an_implementation_keeps_its_colour_in_a_run():
    names = ["torch_eager", "torch_compile", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "ours"]
    found = FIGURE["looks"](names)
    assert found == FIGURE["looks"](reversed(names))
    assert len({look["color"] for look in found.values()}) == len(names)
    many = FIGURE["looks"]([f"library_{i}" for i in range(12)])
    assert len({look["color"] for look in many.values()}) == 12
    more = FIGURE["looks"]([f"library_{i}" for i in range(24)])
    assert len({(look["color"], "markerfacecolor" in look) for look in more.values()}) == 24


def test_a_pass_that_nobody_offers_is_not_drawn():
    rows = pd.DataFrame(
        [
            ("transpose", "forward", "ok"),
            ("transpose", "backward", "unsupported"),
            ("transpose", "backward", "unsupported"),
            ("dot", "backward", "unsupported"),
            ("dot", "backward", "crashed"),
        ],
        columns=["op", "pass", "status"],
    )
    assert FIGURE["_offered"](rows).index.tolist() == [0, 3, 4]
    assert FIGURE["_offered"](rows[:0]).empty


def test_every_status_of_a_cell_has_a_mark_of_its_own():
    marks = {name: status.mark for name, status in FIGURE["STATUSES"].items()}
    assert set(marks) == set(STATUSES) - {"ok"}
    assert len(set(marks.values())) == len(marks)


def test_a_band_is_the_interval_that_the_rows_give():
    times = {"device_us": [8.0, 4.0, 2.0], "ci_lo": [4.0, 2.0, 1.0], "ci_hi": [16.0, 8.0, 2.0]}
    same = {"op": "dot", "impl": "ours", "status": "ok", "timed_by": "graph"}
    panel = {"pass": "forward", "dtype": "float32"}
    rows = pd.DataFrame(times | {"gbps": [100.0, 200.0, 400.0], "x": [2, 4, 8], "sol": 500.0})
    figure = plt.figure()
    place = figure.subfigures(1, 1)
    panels = ("pass", "dtype", "size")
    style = FIGURE["looks"](["ours"])
    FIGURE["_rates"](place, style, rows.assign(**same, **panel), panels, "gbps", "GB/s", True)
    (axes,) = figure.axes
    (band,) = [patch for patch in axes.patches if isinstance(patch, Polygon)]
    found = {tuple(corner) for corner in band.get_xy().round(6).tolist()}
    low, high = [(2, 50), (4, 100), (8, 400)], [(2, 200), (4, 400), (8, 800)]
    assert found == {tuple(map(float, corner)) for corner in [*low, *high]}
    light, line = (artist.get_xydata().tolist() for artist in axes.lines)
    assert light == [[2, 500], [4, 500], [8, 500]]
    assert line == [[2, 100], [4, 200], [8, 400]]
    plt.close(figure)


def test_the_status_stands_at_the_edge_if_a_time_is_missing():
    given = {"gbps": [9.0, None, None], "status": ["ok", "oom", "unsupported"]}
    rows = pd.DataFrame(given | {"impl": ["ours", "liger", "quack"], "sol": 10.0})
    rows = rows.assign(op="dot", line="N 8", timed_by="graph", **{"pass": "forward"})
    figure = plt.figure()
    place = figure.subfigures(1, 1)
    FIGURE["_lone"](place, FIGURE["looks"](rows["impl"]), rows, "gbps", "GB/s")
    (axes,) = figure.axes
    marks = {(line.get_marker(), *line.get_xydata()[0]) for line in axes.lines}
    assert marks == {("x", 0.015, 0), ("2", 0.03, 0)}
    assert axes.get_ylim() == (0.5, -0.5)
    plt.close(figure)


def test_a_time_by_events_has_a_ring():
    rows = pd.DataFrame({"gbps": [8.0, 9.0], "impl": ["ours", "liger"], "sol": 10.0})
    rows = rows.assign(op="dot", line="N 8", status="ok", **{"pass": "forward"})
    counts = []
    for timed_by in (["graph", "graph"], ["graph", "events"]):
        figure = plt.figure()
        own = rows.assign(timed_by=timed_by)
        place, style = figure.subfigures(1, 1), FIGURE["looks"](rows["impl"])
        FIGURE["_lone"](place, style, own, "gbps", "GB/s")
        counts.append(sum(len(marks.get_offsets()) for marks in figure.axes[0].collections))
        plt.close(figure)
    assert counts[1] == counts[0] + 1


def test_a_legend_has_no_more_columns_than_fit():
    columns = FIGURE["_columns"]
    assert columns(["ours"] * 3) == 3
    assert columns(["ours"] * 10) == 5
    assert columns(["ours"] * 19 + ["x" * 70]) < 5
    assert columns(["x" * 200] * 2) == 1


def test_attention_over_the_length_has_plain_cells_and_shows_where_memory_ends(monkeypatch):
    monkeypatch.syspath_prepend(str(PAPER / "figures"))
    script = runpy.run_path(str(PAPER / "figures" / "attention_memory.py"))
    same = {"family": "attention", "set": "grid", "dtype": "bfloat16", "pass": "forward"}
    same |= {"flags": "", "impl": "ours", "status": "ok", "size_B": 4, "size_H": 16, "size_D": 128}
    rows = pd.DataFrame(
        [
            {"size_S": 512},
            {"size_S": 256, "size_B": 8},
            {"size_S": 256, "size_B": 8, "impl": "sdpa_math", "status": "oom"},
            # Another dtype, head, number of tokens, pass, grouped heads and a window.
            {"size_S": 512, "dtype": "float16"},
            {"size_S": 512, "size_D": 64},
            {"size_S": 1024},
            {"size_S": 512, "pass": "backward"},
            {"size_S": 512, "size_K": 4},
            {"size_S": 512, "size_W": 64},
        ]
    )
    rows = rows.fillna(same).assign(**{k: v for k, v in same.items() if k not in rows})
    found = script["_plain"](rows)
    assert found.index.tolist() == [0, 1, 2]
    figure, axes = plt.subplots()
    styles = FIGURE["looks"](found["impl"])
    script["_curves"](axes, found.assign(y=[2.0, 1.0, None]), ["sdpa_math", "ours"], styles)
    curves = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() == "o"]
    assert curves == [[[256, 1], [512, 2]]]
    (mark,) = [line for line in axes.lines if line.get_marker() == script["STATUSES"]["oom"].mark]
    assert mark.get_xydata()[0].tolist() == [256, 0.95]
    plt.close(figure)
