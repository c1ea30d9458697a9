"""The section on networks: its numbers, its figures, and a paper without them."""

import argparse
import importlib
import re
import runpy
import shutil

import pandas as pd
import pytest

from harness.cli import UserError
from harness.results import columns, manifest
from harness.stats import Interval
from harness.summarize import networks
from harness.summarize.__main__ import summarize
from network import calls
from tests.support import networks_run, synthetic
from tests.support.paper_scripts import PAPER, call, make, save, script

FIGURES = ("model", "step_parts", "step_ladder", "step_memory", "step_power", "loss_parity")
EMPTY = "no rows for this figure"
# A row of the summary as it is read: 16 tokens in 2 us of the GPU.
SUMMARIZED = {
    "op": "model_forward", "case": "c", "dtype": "bfloat16", "impl": "ours", "run_id": "r",
    "size_B": 2, "size_S": 8, "flags": "tiny_gpt2", "status": "ok", "reason": "",
    "device_us": 2.0, "ci_lo": 1.9, "ci_hi": 2.1, "tflops": 400.0,
}  # fmt: skip
CELL = ("model_forward", "c", "bfloat16")
SHEET = {"quantity": "bfloat16", "value": 800.0, "source": "data sheet: a title"}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    run = synthetic.write_run(tmp_path_factory.mktemp("shown"), ("dot",))
    networks_run.write_run(run)
    summarize(run, run / "recorded")
    return make(run)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    run = synthetic.write_run(tmp_path_factory.mktemp("bare"), ("dot",))
    summarize(run, run / "recorded")
    return run


def test_no_claim_rests_on_a_network(shown):
    for name in ("claims", "verdicts"):
        ops = set(pd.read_csv(shown / f"{name}.csv")["op"])
        assert "dot" in ops and not ops & set(networks_run.CASES)


def test_the_gaps_of_a_network_say_nothing_of_the_offsets_of_others(shown, bare):
    verdicts = [(run / "verdicts.csv").read_text() for run in (shown, bare)]
    assert verdicts[0] == verdicts[1] and "offset" in verdicts[0].partition("\n")[0]
    rates = [(run / "rates.csv").read_text() for run in (shown, bare)]
    assert rates[0] == rates[1]


def test_the_numbers_of_a_step_follow_from_its_wall_time(shown):
    rows = pd.read_csv(shown / "network.csv").set_index(["op", "batch", "stack"])
    row = rows.loc["model_train_step", 16, "liger"]
    # The third of five blocks, for both times.
    device, us = 60e3 / 1.25 * 1.002, 60e3 / 1.25 * 1.6 * 1.008
    assert row["device_us"] == pytest.approx(device, rel=1e-5)
    assert row["call_us"] == pytest.approx(us, rel=1e-5)
    assert row["tokens"] == 16 * 1024 and row["preset"] == "gpt2-124m"
    assert row["tokens_per_s"] == pytest.approx(16 * 1024 / us * 1e6, rel=1e-5)
    unit, peak = synthetic.CEILINGS["bfloat16"]
    assert unit == "TFLOP/s" and row["peak"] == "measured"
    assert row["mfu"] == pytest.approx(1.4e13 / (us * 1e-6) / (peak * 1e12), rel=1e-5)
    energy = 600 * 60e3 / 1.25 * 1.004
    assert row["energy_mj_per_token"] == pytest.approx(energy / 1e3 / 16 / 1024, rel=1e-4)
    assert row["speedup_vs_eager"] == pytest.approx(1.25 * 1.1 / 1.6, rel=1e-5)
    assert row["device_speedup_vs_eager"] == pytest.approx(1.25, rel=1e-5)
    assert row["peak_mem_bytes"] == int(4e10 / 1.25)
    assert row["call_lo"] < us < row["call_hi"] and row["device_lo"] < device < row["device_hi"]
    # Decoding counts the tokens that are decoded.
    assert rows.loc["model_decode", 1, "ours"]["tokens"] == 128
    lost = rows.loc["model_train_step", 1, "torch_eager"]
    assert lost["status"] == "oom" and lost[["device_us", "call_us", "mfu"]].isna().all()
    assert "ours_twin" not in rows.index.get_level_values("stack")


def test_each_number_of_a_row_is_of_its_own_time():
    eager = SUMMARIZED | {"impl": "torch_eager", "device_us": 6.0}
    calls = {(*CELL, "ours"): Interval(8.0, 7.0, 9.5)}
    calls |= {(*CELL, "torch_eager"): Interval(10.0, 9.0, 11.0)}
    made, _ = networks.rows([SUMMARIZED, eager], {("model_forward", "r"): [SHEET]}, calls, {})
    times = {name: made[name] for name in columns.NETWORK.header if name.endswith(("_us", "_lo"))}
    assert times == {"call_us": 8.0, "call_lo": 7.0, "device_us": 2.0, "device_lo": 1.9}
    assert (made["call_hi"], made["device_hi"]) == (9.5, 2.1)
    assert made["tokens_per_s"] == 2e6
    # 400 TFLOP/s in 2 us are 100 in 8 us, an eighth of the peak.
    assert made["mfu"] == 0.125
    assert made["speedup_vs_eager"] == 1.25 and made["device_speedup_vs_eager"] == 3.0


def test_a_row_without_a_wall_time_has_nothing_that_follows_from_one():
    eager = SUMMARIZED | {"impl": "torch_eager", "device_us": 6.0}
    wall = {"call_us", "call_lo", "call_hi", "tokens_per_s", "mfu", "peak", "speedup_vs_eager"}
    rates = {("model_forward", "r"): [SHEET]}
    made, _ = networks.rows([SUMMARIZED, eager], rates, {}, {})
    assert not wall & set(made)
    assert made["device_us"] == 2.0 and made["device_speedup_vs_eager"] == 3.0
    # The wall time of eager PyTorch alone may be absent as well.
    made, _ = networks.rows([SUMMARIZED, eager], rates, {(*CELL, "ours"): Interval(8, 7, 9)}, {})
    assert wall - set(made) == {"speedup_vs_eager"}


def test_the_wall_time_is_the_median_of_the_blocks():
    def blocks(impl, times, **more):
        about = {"case": "c", "dtype": "bfloat16", "device_us": 5.0}
        for number, us in enumerate(times):
            given = about | {"op": "model_forward", "call_us": us} | more
            yield synthetic.block(number, impl, **{"time": 5.0} | given)

    raw = [
        *blocks("ours", [40.0, 10.0, 20.0]),
        *blocks("liger", [30.0] * 3),
        *blocks("xformers", [None] * 3),
        *blocks("torch_eager", [50.0] * 3, status="oom"),
    ]
    found = networks.call_times(raw)
    assert set(found) == {(*CELL, "ours"), (*CELL, "liger")}
    ours = found[(*CELL, "ours")]
    # The least of the blocks is 10, their mean 23.
    assert ours.value == pytest.approx(20.0) and ours.lo < 20 < ours.hi
    assert found[(*CELL, "liger")] == pytest.approx((30.0, 30.0, 30.0))


def test_a_remark_says_what_starts_the_kernels_of_a_call():
    def rows(impl, reason):
        about = {"case": "c", "dtype": "bfloat16", "op": "model_forward", "reason": reason}
        return synthetic.block(0, impl, 5.0, **about)

    said = {"ours": "events: memory; a graph", "liger": "events: memory", "xformers": ""}
    said["torch_compile"] = f"events: memory; {columns.SUSTAINED}; a graph"
    found = networks.remarks([rows(*each) for each in said.items()])
    (host,) = calls.Forward("torch_eager").remarks
    stacks = [SUMMARIZED | {"impl": impl} for impl in said]
    made = networks.rows(stacks, {("model_forward", "r"): [SHEET]}, {}, found)
    told = [(each["launched"], each.get("sustained")) for each in made]
    assert told == [("a graph", False), (host, False), ("", None), ("a graph", True)]


def test_the_data_sheet_gives_the_peak_where_it_has_one():
    rates = [{"quantity": "bfloat16", "value": 600.0, "source": "measured"}, SHEET]
    calls = {(*CELL, "ours"): Interval(4.0, 3.0, 5.0)}
    row = SUMMARIZED
    (made,) = networks.rows([row, row | {"op": "dot"}], {("model_forward", "r"): rates}, calls, {})
    assert made["mfu"] == 0.25 and made["peak"] == "data sheet: a title"
    assert made["preset"] == "tiny-gpt2" and "speedup_vs_eager" not in made
    (made,) = networks.rows([row], {("model_forward", "r"): []}, calls, {})
    assert "mfu" not in made and made["tokens_per_s"] == 4e6
    # Each part of a measurement has the rates of its own machine.
    parts = {("model_forward", "r"): rates[:1], ("model_forward", "s"): rates[1:]}
    made = networks.rows([row, row | {"run_id": "s"}], parts, calls, {})
    assert [each["peak"] for each in made] == ["measured", "data sheet: a title"]


def test_the_reports_of_stacks_are_shown(shown):
    found = pd.read_csv(shown / "capabilities.csv")
    step = set(found.loc[found["op"] == "model_train_step", "impl"])
    assert step == {"ours", "torch_eager", "liger", "xformers", "torch_eager_with_swiglu"}
    # A stack with one part of ours implements the step alone.
    assert "torch_eager_with_swiglu" not in set(found.loc[found["op"] == "model_decode", "impl"])
    drawn = (shown / "figures/capabilities.svg").read_text()
    assert "liger" in drawn and "_with_" not in drawn


def test_every_figure_has_rows(shown):
    for name in FIGURES:
        assert EMPTY not in (shown / "figures" / f"{name}.svg").read_text(), name


def test_the_bars_of_the_power_hold_what_a_counter_in_steps_hides(monkeypatch):
    monkeypatch.syspath_prepend(PAPER / "figures")
    monkeypatch.syspath_prepend(PAPER)
    find = runpy.run_path(str(PAPER / "figures/step_power.py"))["power"]
    # Steps of 257 ms at 700 W, by a counter that moves each 0.1 s.
    steps = pd.DataFrame({"at_s": [0.257 * (call + 1) for call in range(34)]})
    steps["energy_j"] = 70.0 * (steps["at_s"] * 10).astype(int)
    found = find(steps)
    assert list(found["end_s"]) == pytest.approx([0.257 * end for end in (9, 17, 25, 33)])
    assert list(found["begin_s"]) == pytest.approx([0.257 * end for end in (1, 9, 17, 25)])
    gaps = (found["watts"] - 700).abs()
    assert (gaps <= found["off"]).all() and gaps.max() > 0.3 * found["off"].min()
    assert list(found["off"]) == pytest.approx(list(found["watts"] * 0.1 / (8 * 0.257)))
    # No step runs during the last reading, so no window ends there.
    assert len(find(steps.iloc[:33])) == 3
    assert find(steps.assign(energy_j=None)).empty


def test_the_ladder_predicts_by_amdahl(shown):
    text = (shown / "figures/step_ladder.svg").read_text()
    # From 250 ms attention saves a third of 48; two more blocks of 100 us make the median.
    assert "predicted from the parts alone" in re.sub(r"<!--|-->", "", text)
    assert "4 x 4096 tokens, bfloat16, NVIDIA H200" in text
    before, after = 250.1, 250.1 - 48 / 3
    gap = 238.1 / after - 1
    assert f"{gap:+.1%}" in text and before > after


def test_the_ladder_predicts_up_to_a_part_that_was_not_timed_alone(shown, monkeypatch):
    monkeypatch.syspath_prepend(PAPER / "figures")
    monkeypatch.syspath_prepend(PAPER)
    parts, alone = (pd.read_csv(shown / f"{name}.csv") for name in ("step_parts", "parts_alone"))
    clip = parts[parts["part"] == "optimizer"].assign(part="clip")
    both = alone[alone["part"] == "rotary"].assign(part="optimizer")
    parts, alone = pd.concat([parts, clip]), pd.concat([alone, both])
    find = runpy.run_path(str(PAPER / "figures/step_ladder.py"))["prediction"]
    names = pd.Series(["", "optimizer", "swiglu_mlp", "rotary"])
    found = find(pd.Series([250.0] * 4), names, parts, alone, alone.iloc[0])
    # The optimizer and clipping take 6 ms each, and the optimizer alone clips too.
    assert found[1] == pytest.approx(250 - 12 * (1 - 1 / 12))
    assert pd.isna(found[2:]).all()
    # Shares that another GPU gave say nothing of this one.
    other = parts.assign(gpu="another")
    assert find(pd.Series([250.0] * 4), names, other, alone, alone.iloc[0]) is None
    unknown = pd.Series(["", "swiglu_mlp"])
    assert find(pd.Series([250.0] * 2), unknown, parts, alone, alone.iloc[0]) is None


def test_the_table_names_each_stack_once_for_a_case(shown):
    text = (shown / "tables/network.tex").read_text()
    table = text[text.index(r"\newcommand{\networktable}") :]
    assert table.count("ours") == 3 and "with" not in table
    assert r"\newcommand{\whennetwork}[1]{#1}" in text
    assert "oom: CUDA out of memory" in text
    # A decoding names the tokens that it decodes.
    assert table.count(" + 128, bfloat16") == table.count("Prompt and decoding") > 0


@pytest.fixture
def written(tmp_path):
    """A run of three stacks in one cell, whose times are known by both clocks or by one."""
    cell = {
        "op": "model_train_step", "case": "c", "dtype": "bfloat16", "preset": "tiny", "batch": 2,
        "length": 8, "tokens": 16, "status": "ok", "peak_mem_bytes": 2**30,
    }  # fmt: skip
    ours = {"call_us": 8000, "device_us": 2000, "tokens_per_s": 2000, "mfu": 0.125}
    ours |= {"speedup_vs_eager": 0.75, "device_speedup_vs_eager": 3.5}
    eager = {"call_us": 6000, "device_us": 7000, "tokens_per_s": 2667, "mfu": 0.17}
    eager |= {"speedup_vs_eager": 1, "device_speedup_vs_eager": 1}
    liger = {"device_us": 1000, "device_speedup_vs_eager": 7}
    rows = [("ours", ours), ("liger", liger), ("torch_eager", eager)]
    save(tmp_path, "network", [cell | {"stack": name} | more for name, more in rows])
    for name in networks_run.DISSECTED:
        save(tmp_path, name, [])
    return tmp_path


def test_the_table_has_both_times_each_with_its_ratio(written):
    text = script(PAPER / "tables/network.py", written, written / "network.tex").read_text()
    table = text[text.index(r"\newcommand{\networktable}") :]
    head = table[table.index(r"\toprule") : table.index(r"\endfirsthead")]
    # The names of the times stand above the columns of each.
    assert r"& & \multicolumn{4}{c}{wall time} & \multicolumn{2}{c}{GPU time} & &" in head
    assert " & stack & ms & eager & tokens/s & MFU & ms & eager & peak & energy" in head
    lines = [line for line in table.splitlines() if line.startswith(r" & \texttt{")]
    found = [re.findall(r"\\num\{([^}]*)\}|(--)", line) for line in lines]
    eager, ours, liger = ([number or dash for number, dash in line] for line in found)
    # The least wall time stands first, a row without one last.
    assert eager[:6] == ["6.00", "1.00", "2667", "17", "7.00", "1.00"]
    assert ours == ["8.00", "0.750", "2000", "12", "2.00", "3.50", "1.00", "--"]
    assert liger == ["--", "--", "--", "--", "1.00", "7.00", "1.00", "--"]


def test_the_calls_in_which_the_gpu_waits_are_named(written, shown):
    def waits(run):
        text = script(PAPER / "tables/network.py", run, written / "network.tex").read_text()
        return re.search(r"\\newcommand\{\\networkwaits\}\{(.*)\}", text)[1]

    said = waits(written)
    assert said.endswith(r"Training step: tiny, 2 x 8, bfloat16: \texttt{ours}.")
    # In the other run ours waits longest, and those below three halves are not named.
    assert waits(shown).count(r"bfloat16: \texttt{ours} and \texttt{liger}.") == 3
    rows = pd.read_csv(written / "network.csv")
    save(written, "network", rows.assign(call_us=rows["device_us"]).to_dict("records"))
    assert waits(written) == ""


def test_the_section_says_which_stacks_are_graphs(written, shown):
    def launched(run):
        text = script(PAPER / "tables/network.py", run, written / "network.tex").read_text()
        found = re.search(r"\\newcommand\{\\networklaunched\}\{(.*)\}", text)[1]
        return found.replace(r"\allowbreak{}", "")

    assert launched(written) == ""
    step, decode = launched(shown).split(". ")
    graphs, host = step.removeprefix("Training step: ").split("; ")
    stacks = r"\texttt{ours}, \texttt{torch\_eager} and \texttt{xformers}"
    assert graphs == f"a step is a CUDA graph ({stacks})"
    assert host == r"the host launches each kernel (\texttt{liger})"
    assert decode == "Prompt and decoding: a decoded token is a CUDA graph."


def test_the_section_says_whether_calls_came_long_before_the_clock(written, shown):
    def said(run):
        text = script(PAPER / "tables/network.py", run, written / "network.tex").read_text()
        return re.search(r"\\newcommand\{\\networksustained\}\{(.*)\}", text)[1]

    assert "calls follow each other for seconds" in said(shown)
    rows = pd.read_csv(shown / "network.csv").assign(launched="", reason="")
    older = rows.assign(sustained=[0, *rows["sustained"][1:]])
    save(written, "network", older.to_dict("records"))
    assert "a second after a rest" in said(written)


def test_the_figure_has_a_panel_for_each_time(written, monkeypatch):
    monkeypatch.syspath_prepend(PAPER)
    monkeypatch.syspath_prepend(PAPER / "figures")
    drawn = []
    module = importlib.import_module("_figure")
    monkeypatch.setattr(module, "save", lambda figure, *_: drawn.append(figure))
    given = argparse.Namespace(run=written, out=written / "model.pdf")
    runpy.run_path(str(PAPER / "figures/model.py"))["main"](given)
    wall, device = drawn[0].axes
    assert wall.get_xlabel() == "wall time of the stack over that of ours"
    assert device.get_xlabel() == "GPU time of the stack over that of ours"
    # The first line is the one at ours.
    ratios = [[line.get_xdata()[0] for line in axes.lines[1:]] for axes in (wall, device)]
    assert ratios == [[1.0, 0.75], [1.0, 0.5, 3.5]]
    for axes, found in zip((wall, device), ratios, strict=True):
        low, high = axes.get_xlim()
        assert low < min(found) and max(found) < high and axes.get_xscale() == "log"


def test_a_far_ratio_stands_at_the_edge_with_its_number(written, monkeypatch):
    rows = pd.read_csv(written / "network.csv")
    far = rows["stack"] == "torch_eager"
    times = {name: rows[name].mask(far, 34 * 8000) for name in ("call_us", "device_us")}
    save(written, "network", rows.assign(**times).to_dict("records"))
    monkeypatch.syspath_prepend(PAPER)
    monkeypatch.syspath_prepend(PAPER / "figures")
    drawn = []
    monkeypatch.setattr(importlib.import_module("_figure"), "save", lambda *it: drawn.append(it[0]))
    given = argparse.Namespace(run=written, out=written / "model.pdf")
    runpy.run_path(str(PAPER / "figures/model.py"))["main"](given)
    # The wall time of ours is 8000 us, its GPU time 2000.
    for axes, said in zip(drawn[0].axes, ("34", "136"), strict=True):
        assert [text.get_text() for text in axes.texts] == [said]
        assert max(line.get_xdata()[0] for line in axes.lines) == 6 < axes.get_xlim()[1] < 8


def test_a_cell_that_was_not_reached_has_one_line_and_no_place_in_the_figure(shown, tmp_path):
    for path in shown.glob("*"):
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    rows = pd.read_csv(shown / "network.csv")
    late = rows[(rows["op"] == "model_decode") & (rows["batch"] == 1)]
    late = late.assign(status="unreached", reason="the measurement ended before this cell")
    late = late.assign(batch=77, case="late").assign(device_us=float("nan"), call_us=float("nan"))
    pd.concat([rows, late]).to_csv(tmp_path / "network.csv", index=False)
    text = script(PAPER / "tables/network.py", tmp_path, tmp_path / "network.tex").read_text()
    line = r"all & \multicolumn{8}{l}{unreached: the measurement ended before this cell}"
    assert len(late) > 1 and text.count("ended before this cell") == text.count(line) == 1
    # Some of a cell's stacks without a time are named one by one.
    assert r"\texttt{" in text[: text.index("oom: CUDA out of memory")].rsplit("\n", 1)[1]
    drawn = script(PAPER / "figures/model.py", tmp_path, tmp_path / "model.pdf")
    assert "unreached" not in drawn.with_suffix(".svg").read_text()


def test_the_band_judges_each_stack(shown):
    text = (shown / "tables/network.tex").read_text()
    assert r"In the band throughout: \texttt{ours}." in text and "Out of it" not in text
    find = runpy.run_path(str(PAPER / "_parity.py"))["parity"]
    rows = pd.read_csv(shown / "loss_parity.csv")
    width = find(rows).width
    # Odd steps of the seeds go up and even ones down; three steps make a window.
    assert len(width) == 12 and width == pytest.approx(0.1 / 3)
    far = rows["stack"].eq("ours") & rows["step"].lt(4)
    found = find(rows.assign(loss=rows["loss"] + 0.05 * far))
    assert found.outside("ours") == 1
    found = find(rows.assign(loss=rows["loss"].mask(far)))
    assert found.outside("ours") == 2
    assert find(rows[rows["seed"] < 2]) is None


def test_the_section_stands_in_the_paper(shown):
    done = call("build.py", shown, shown / "paper.pdf")
    assert "Error" not in done.stderr, done.stderr
    if shutil.which("latexmk"):
        assert done.returncode == 0, done.stderr
        log = (shown / "tex/main.log").read_text()
        assert all(f"figures/{name}.pdf" in log for name in FIGURES)


def test_a_run_without_a_network_has_no_section(bare):
    for name in FIGURES:
        out = script(PAPER / "figures" / f"{name}.py", bare, bare / "figures" / f"{name}.pdf")
        assert EMPTY in out.with_suffix(".svg").read_text()
    out = script(PAPER / "tables/network.py", bare, bare / "tables/network.tex")
    commands = re.findall(r"\\newcommand\{\\(when\w+)\}\[1\]\{(.*)\}", out.read_text())
    assert len(commands) == 7 and not any(body for _, body in commands)
    section = (PAPER / "sections/network.tex").read_text()
    # Nothing stands outside of the commands, so nothing is printed.
    assert re.sub(r"(?ms)^\\when\w+\{%\n.*?^\}\n", "", section) == ""


def test_figures_of_a_step_have_their_section_without_timed_calls(shown, tmp_path):
    """They stood among the results of the kernels, without a word on what a stack is."""
    for path in shown.glob("*.csv"):
        text = path.read_text()
        (tmp_path / path.name).write_text(
            text.splitlines(keepends=True)[0] if path.stem == "network" else text
        )
    (tmp_path / "columns.json").write_bytes((shown / "columns.json").read_bytes())
    text = script(PAPER / "tables/network.py", tmp_path, tmp_path / "network.tex").read_text()
    shows = dict(re.findall(r"\\newcommand\{\\(when\w+)\}\[1\]\{(.*)\}", text))
    assert shows["whenanynetwork"] == shows["whenstepparts"] == "#1" and not shows["whennetwork"]
    section = (PAPER / "sections/network.tex").read_text()
    first = section.partition("\n}\n")[0]
    assert first.startswith("\\whenanynetwork{%\n\\section{Networks}")


def test_recorded_files_are_shown_if_the_run_has_none(tmp_path):
    recorded, name = tmp_path / "recorded", "step_memory"
    networks_run.write_run(recorded)
    table = columns.DISSECTED[name]
    manifest.seal(recorded)
    rows = networks.dissected(tmp_path / "run", recorded, table)
    assert [row["status"] for row in rows][:4] == ["ok", "ok", "ok", "oom"]
    path = recorded / "dissect" / f"{name}.csv"
    path.write_text(path.read_text().replace("8192", "8193"))
    with pytest.raises(UserError, match="its SHA-256 is not the one in manifest"):
        networks.dissected(tmp_path / "run", recorded, table)
    path.write_text("a,b\n")
    with pytest.raises(UserError, match="its columns are not those of step_memory"):
        networks.dissected(recorded, None, table)
    assert networks.dissected(tmp_path, tmp_path / "none", table) == []
