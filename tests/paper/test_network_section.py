"""The section on networks: its numbers, its figures, and a paper without them."""

import re
import runpy
import shutil

import pandas as pd
import pytest

from harness.cli import UserError
from harness.results import columns, manifest
from harness.summarize import networks
from harness.summarize.__main__ import summarize
from tests.support import networks_run, synthetic
from tests.support.paper_scripts import PAPER, call, make, script

FIGURES = ("model", "step_parts", "step_ladder", "step_memory", "loss_parity")
EMPTY = "no rows for this figure"


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


def test_the_numbers_of_a_step_follow_from_its_time(shown):
    rows = pd.read_csv(shown / "network.csv").set_index(["op", "batch", "stack"])
    row = rows.loc["model_train_step", 16, "liger"]
    us = 60e3 / 1.25 * 1.002
    assert row["device_us"] == pytest.approx(us, rel=1e-5)
    assert row["tokens"] == 16 * 1024 and row["preset"] == "gpt2-124m"
    assert row["tokens_per_s"] == pytest.approx(16 * 1024 / us * 1e6, rel=1e-5)
    unit, peak = synthetic.CEILINGS["bfloat16"]
    assert unit == "TFLOP/s" and row["peak"] == "measured"
    assert row["mfu"] == pytest.approx(1.4e13 / (us * 1e-6) / (peak * 1e12), rel=1e-5)
    energy = 600 * 60e3 / 1.25 * 1.004
    assert row["energy_mj_per_token"] == pytest.approx(energy / 1e3 / 16 / 1024, rel=1e-4)
    assert row["speedup_vs_eager"] == pytest.approx(1.25, rel=1e-5)
    assert row["peak_mem_bytes"] == int(4e10 / 1.25)
    # Decoding counts the tokens that are decoded.
    assert rows.loc["model_decode", 1, "ours"]["tokens"] == 128
    lost = rows.loc["model_train_step", 1, "torch_eager"]
    assert lost["status"] == "oom" and pd.isna(lost["device_us"]) and pd.isna(lost["mfu"])
    assert "ours_twin" not in rows.index.get_level_values("stack")


def test_the_data_sheet_gives_the_peak_where_it_has_one():
    rates = [
        {"quantity": "bfloat16", "value": 800.0, "source": "measured"},
        {"quantity": "bfloat16", "value": 989.5, "source": "data sheet: a title"},
    ]
    row = {"op": "model_forward", "case": "c", "dtype": "bfloat16", "impl": "ours", "run_id": "r",
           "size_B": 2, "size_S": 8, "flags": "tiny_gpt2", "status": "ok", "reason": "",
           "device_us": 2.0, "ci_lo": 1.9, "ci_hi": 2.1, "tflops": 494.75}  # fmt: skip
    (made,) = networks.rows([row, row | {"op": "dot"}], {("model_forward", "r"): rates})
    assert made["mfu"] == 0.5 and made["peak"] == "data sheet: a title"
    assert made["preset"] == "tiny-gpt2" and "speedup_vs_eager" not in made
    (made,) = networks.rows([row], {("model_forward", "r"): []})
    assert "mfu" not in made
    # Each part of a measurement has the rates of its own machine.
    parts = {("model_forward", "r"): rates[:1], ("model_forward", "s"): rates[1:]}
    peaks = [each["peak"] for each in networks.rows([row, row | {"run_id": "s"}], parts)]
    assert peaks == ["measured", "data sheet: a title"]


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


def test_a_cell_that_was_not_reached_has_one_line_and_no_place_in_the_figure(shown, tmp_path):
    for path in shown.glob("*"):
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    rows = pd.read_csv(shown / "network.csv")
    late = rows[(rows["op"] == "model_decode") & (rows["batch"] == 1)]
    late = late.assign(status="unreached", reason="the measurement ended before this cell")
    late = late.assign(batch=77, case="late").assign(**{"device_us": float("nan")})
    pd.concat([rows, late]).to_csv(tmp_path / "network.csv", index=False)
    text = script(PAPER / "tables/network.py", tmp_path, tmp_path / "network.tex").read_text()
    line = r"all & \multicolumn{6}{l}{unreached: the measurement ended before this cell}"
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
    assert len(commands) == 6 and not any(body for _, body in commands)
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
