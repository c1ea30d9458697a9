"""Check the paper's scripts on made-up runs: output, repeatability and error messages."""

import re
import runpy
import shutil

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot

from harness import stats
from harness.calls import tolerance
from harness.summarize import rates
from harness.summarize.__main__ import summarize
from tests.support import synthetic
from tests.support.paper_scripts import FIGURES, PAPER, call, make, numbers, script

# Most of them draw all figures and tables of a run.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    recorded = tmp_path_factory.mktemp("recorded")
    run = synthetic.write_run(tmp_path_factory.mktemp("full"), mode="replayed", recorded=recorded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_TUNED", str(synthetic.write_table(tmp_path_factory.mktemp("t"))))
        summarize(run, recorded)
    return make(run)


@pytest.fixture(scope="module")
def reduced(tmp_path_factory):
    run = synthetic.write_run(tmp_path_factory.mktemp("reduced"), ("dot",))
    shutil.rmtree(run / "build")
    summarize(run, run / "recorded")
    return make(run)


def test_every_claim_resolves_on_a_full_run(full):
    left_out = [
        line for line in (full / "numbers.tex").read_text().splitlines()[1:] if line[0] == "%"
    ]
    assert left_out == []
    found = numbers(full)
    assert found["ops"] == str(len(synthetic.FAMILIES))
    assert found["baselines"] == "6"
    built = pd.read_csv(full / "resources.csv")
    assert found["kernels"] == str(len(built.drop_duplicates(["file", "kernel"])))
    parts = ("better", "worse", "same", "undecided")
    for whole in ("comparisons", "claims"):
        assert sum(int(found[f"{whole}_{part}"]) for part in parts) == int(found[whole])
    assert found["overhead_share"] == "20"
    assert found["overhead_total"] == str(100 * len(synthetic.FAMILIES))


def test_a_claim_without_rows_is_left_out_with_a_comment(reduced):
    assert "attention_rate" not in numbers(reduced)
    text = (reduced / "numbers.tex").read_text()
    assert "% attention_rate: no row of summary.csv supports it" in text


def test_a_number_that_nothing_supports_stops_the_build_and_is_named(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    table = run / "tables" / "families.tex"
    lines = ["A guarded \\whenresult{no_such}{\\result{no_such}}.", "A bare", "\\result{invented}."]
    table.write_text("\n".join(lines))
    done = call("build.py", run, run / "paper.pdf")
    assert done.returncode == 2
    assert f"{table}:3: \\result{{invented}}" in done.stderr
    assert "no_such" not in done.stderr
    assert not (run / "paper.pdf").exists()


def test_every_number_that_the_sections_cite_is_claimed():
    claimed = set(re.findall(r"^(\w+):", (PAPER / "claims.yaml").read_text(), re.MULTILINE))
    for path in [PAPER / "main.tex", *PAPER.glob("sections/*.tex")]:
        cited = set(re.findall(r"\\(?:when)?result\{(\w+)\}", path.read_text()))
        assert cited <= claimed, path.name


def test_the_rules_that_the_text_words_are_those_of_the_code():
    method = " ".join((PAPER / "sections" / "method.tex").read_text().split())
    threats = (PAPER / "sections" / "threats.tex").read_text()
    assert (stats.CONFIDENCE, "\\SI{95}{\\percent}" in method) == (0.95, True)
    assert (stats.MARGIN, "more than one percent" in method) == (0.01, True)
    assert "$p$ is at most 0.05" in method
    assert (rates.FAMILY, "families of fifty cells" in method) == (50, True)
    assert (rates.SHORT_US[0] <= 20 <= rates.SHORT_US[1], "some \\SI{20}" in method) == (True, True)
    assert (rates.PROCESSES, "With six processes" in threats) == (("as run", 6), True)
    assert (stats.FEWEST_BLOCKS, "fewer than five" in threats) == (5, True)
    assert (tolerance.FACTOR, "at most twice the error" in method) == (2, True)


def test_every_claim_is_cited():
    text = "".join(path.read_text() for path in PAPER.glob("sections/*.tex"))
    for key in re.findall(r"^(\w+):", (PAPER / "claims.yaml").read_text(), re.MULTILINE):
        assert f"\\result{{{key}}}" in text, key


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_made_twice_has_the_same_bytes(full, tmp_path, name):
    again = script(PAPER / "figures" / f"{name}.py", full, tmp_path / f"{name}.pdf")
    for kind in (".pdf", ".svg"):
        first = (full / "figures" / name).with_suffix(kind).read_bytes()
        assert first == again.with_suffix(kind).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.pdf", f"{name}.svg"]


def test_figures_and_tables_run_as_plain_commands(full, tmp_path):
    for name in ("figures/softmax.py", "tables/closest.py"):
        done = call(name, full, tmp_path / "out.pdf")
        assert (done.returncode, done.stderr) == (0, "")


def test_a_reduced_run_makes_everything(reduced):
    for name in FIGURES:
        assert (reduced / "figures" / f"{name}.svg").read_bytes().startswith(b"<?xml")
    families = (reduced / "tables" / "families.tex").read_text()
    assert "family_vector" in families
    assert "family_softmax" not in families


def test_a_family_without_figure_and_section_gets_plain_ones(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    for name in ("summary.csv", "verdicts.csv"):
        text = (run / name).read_text()
        (run / name).write_text(text.replace("scale,vector,", "scale,novel_family,"))
    # Each other figure shows families that it names.
    make(run, figures=("headline", "others"))
    assert (run / "figures" / "others.svg").read_bytes() != (
        full / "figures/others.svg"
    ).read_bytes()
    families = (run / "tables" / "families.tex").read_text()
    assert "\\subsection{Novel family}" in families
    assert "{figures/others}" in families


def test_each_op_in_which_the_best_rival_is_ahead_is_named(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    claims = pd.read_csv(run / "claims.csv")
    best = claims["against"] == "best"

    def sentence(verdicts):
        claims.assign(verdict=verdicts).to_csv(run / "claims.csv", index=False)
        text = script(PAPER / "tables" / "claims.py", run, tmp_path / "claims.tex").read_text()
        text = text.replace("\\allowbreak{}", "").replace("\\_", "_")
        return re.search(r"\\bestsentence}\{(.*)\}", text)[1]

    behind = best & claims["op"].isin(["dot", "softmax"])
    said = sentence(claims["verdict"].mask(best, "better").mask(behind, "worse"))
    several = set(claims["op"][claims["pass"] != "forward"])
    expected = {
        (row.op, f" {row._3}" if row.op in several else "", row.baseline)
        for row in claims[behind][["op", "family", "pass", "baseline"]].itertuples()
    }
    assert set(re.findall(r"\\texttt\{(\w+)\}( \w+)? \(\\texttt\{(\w+)\}\)", said)) == expected
    # The best rival loses nothing if only a single slower baseline is ahead of ours.
    none = sentence(claims["verdict"].mask(best, "better").mask(~best, "worse"))
    assert none == "In no operation and pass is a rival shown to take less time."


def test_code_that_has_changed_since_its_times_were_taken_is_named(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    runs = pd.read_csv(run / "runs.csv", keep_default_na=False)
    assert (runs["changed_ops"] == "").all()
    names = ("provenance", "families")
    for changed, said in {"": 0, "scale softmax": 2, "dot": 1}.items():
        runs.assign(changed_ops=changed).to_csv(run / "runs.csv", index=False)
        first, sections = (
            script(PAPER / "tables" / f"{name}.py", run, tmp_path / name).read_text()
            for name in names
        )
        assert sections.count("has changed since") == said
        assert first.count("A dagger") == bool(changed)
        daggered = re.findall(r"\\texttt\{(\w+)\}\$\^\\dagger\$", first)
        assert set(daggered) == set(changed.split())


def test_the_first_page_says_in_a_table_which_op_is_of_which_board(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    one = pd.read_csv(run / "runs.csv", keep_default_na=False).iloc[0]
    told = {"run_id": "20260101T0000Z-abc-h200", "board": "GPU-0123456789", "gpu": "NVIDIA H200"}
    old = dict(one) | told | {"ops": "dot scale", "mode": "replayed", "harness_sha256": ""}
    new = old | {"board": "GPU-fedcba9876", "ops": "softmax", "harness_sha256": "e" * 64}

    def page(*rows):
        pd.DataFrame(rows).to_csv(run / "runs.csv", index=False)
        text = script(PAPER / "tables" / "provenance.py", run, tmp_path / "t").read_text()
        text = text.replace(r"\allowbreak{}", "")
        return text, [line for line in text.splitlines() if line.endswith(r"\\")][1:]

    text, rows = page(old, new)
    assert "replayed from a recorded run." in text and text.count("A dash") == 1
    assert [row.count(" & ") for row in rows] == [3, 3]
    assert (
        r"\sidebyside}{Times of a run were taken on several: on 2 GPUs in run \texttt{2026" in text
    )
    assert rows[0].startswith(r"\texttt{dot}, \texttt{scale} & \texttt{20260101T0000Z-abc-h200}")
    assert r"\texttt{GPU-01234567} & --" in rows[0]
    assert r"\texttt{GPU-fedcba98} & \texttt{eeeeeeee}" in rows[1]
    text, rows = page(new)
    assert "A dash" not in text and rows[0].startswith("all 1 &")
    assert r"\sidebyside}{No run of this document has times of several. The guide" in text
    text, rows = page(old, new | {"mode": "measured", "dirty": True})
    assert "Some times were measured" in text
    assert [row.split(" & ")[-1] for row in rows] == [r"replayed \\", r"measured \\"]
    assert ["uncommitted" in row for row in rows] == [False, True]


def test_every_claim_is_in_the_table_with_its_verdict(full):
    text = (full / "tables" / "claims.tex").read_text()
    claims = pd.read_csv(full / "claims.csv")
    parts = dict(zip(("best", "each"), text.split("\\newcommand{\\claimstable}"), strict=True))
    for against, part in parts.items():
        asked = claims[claims["against"] == against]
        lines = [line for line in part.splitlines() if line.endswith(r" \\") and " of " in line]
        assert len(lines) == len(asked) > 0
        for verdict, count in asked["verdict"].value_counts().items():
            assert sum(f"& {verdict} " in line for line in lines) == count


def test_a_ratio_beyond_ten_is_starred(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    claims = pd.read_csv(run / "claims.csv", keep_default_na=False)
    assert "$^*$" not in (full / "tables" / "claims.tex").read_text()
    first = claims.index[claims["against"] == "each"][0]
    claims.loc[first, ["ratio", "note"]] = 12.5, "more than 10 times"
    claims.to_csv(run / "claims.csv", index=False)
    text = script(PAPER / "tables" / "claims.py", run, tmp_path / "claims.tex").read_text()
    assert "12.500$^*$" in text


def test_the_table_of_machines_names_the_environment_by_hash(full):
    hashes = pd.read_csv(full / "runs.csv")["environment_sha256"]
    text = (full / "tables" / "environment.tex").read_text().replace("\\allowbreak{}", "")
    assert all(value[:12] in text for value in hashes)


def test_the_table_of_machines_has_no_column_for_each_run(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    runs = [f"20260101T000{n}Z-aaaaaaa-h200" for n in range(9)]
    facts = {
        "python": ["3.12"] * 9,
        "cores": ["16"] * 2 + ["32"] * 3 + ["16"] * 4,
        "versions.x": ["1"] + [""] * 8,
    }
    rows = [
        {"run_id": name, "key": key, "value": values[n]}
        for n, name in enumerate(runs)
        for key, values in ({"run_id": runs} | facts).items()
    ]
    pd.DataFrame(rows).to_csv(run / "environment.csv", index=False)
    text = script(
        PAPER / "tables" / "environment.py", run, tmp_path / "environment.tex"
    ).read_text()
    text = text.replace("\\allowbreak{}", "")
    assert all(rf"\texttt{{{name}}}, this machine & {n}" in text for n, name in enumerate(runs, 1))
    assert r"\texttt{python} & \texttt{3.12} & all \\" in text
    assert r"\texttt{cores} & \texttt{16} & 1, 2, 6--9 \\" in text
    assert r"& \texttt{32} & 3--5 \\" in text and text.count(r"\texttt{cores}") == 1
    assert r"\texttt{versions.x} & \texttt{1} & 1 \\" in text
    assert r"& absent & 2--9 \\" in text


def test_the_gap_to_the_twin_is_that_of_the_longer_calls(full):
    rows = pd.read_csv(full / "summary.csv")
    rows = rows[(rows["impl"] == "ours") & (rows["status"] == "ok") & (rows["device_us"] >= 20)]
    rows = rows[rows["timed_by"] == "graph"]
    gaps = (rows["speedup_vs_ours_twin"] - 1).abs() * 100
    assert numbers(full)["twin_gap_median"] == f"{gaps.median():.2f}"
    assert numbers(full)["twin_gap_p95"] == f"{gaps.quantile(0.95):.2f}"


def test_a_report_that_is_not_ok_shows_its_status_and_an_error_without_end(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    rows = pd.read_csv(run / "verification.csv", keep_default_na=False)
    broken = ["crashed", 1, 1e6]
    rows.loc[rows["impl"] == "sdpa_flash", ["status", "passed", "worst_ratio"]] = broken
    rows.to_csv(run / "verification.csv", index=False)
    out = script(PAPER / "tables" / "verification.py", run, tmp_path / "verification.tex")
    line = next(line for line in out.read_text().splitlines() if "crashed" in line)
    assert "sdpa" in line
    assert "{$>999$}" in line
    assert "crashed" not in (full / "tables" / "verification.tex").read_text()


def test_each_family_says_by_pass_where_ours_stands(full):
    text = (full / "tables" / "families.tex").read_text()
    verdicts = pd.read_csv(full / "verdicts.csv")
    fastest = verdicts.sort_values("ratio").drop_duplicates(["op", "case", "dtype", "pass"])
    softmax = fastest[(fastest["family"] == "softmax") & (fastest["pass"] == "forward")]
    mean = np.exp(np.log(softmax["ratio"]).mean())
    measured = text.partition("family_softmax")[2].partition("Measured.}\n")[2].splitlines()[0]
    assert measured.startswith(f"Forward ({len(softmax)}~cells), ours ")
    assert f"is {mean:.2f} in the geometric mean, {softmax['ratio'].min():.2f} to" in measured
    verdicts = softmax["verdict"].value_counts()
    lead = verdicts.get("better", 0) - verdicts.get("worse", 0)
    side = "by turns" if (mean - 1) * lead <= 0 else "ahead" if lead > 0 else "behind"
    assert ("level" if 0.99 <= mean <= 1.01 else side) in measured.partition(":")[0]
    assert f"more in {(softmax['verdict'] == 'worse').sum()}," in measured


def test_the_large_cells_that_are_behind_are_all_listed(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    verdicts = pd.read_csv(run / "verdicts.csv", keep_default_na=False)
    large = (verdicts["bound"] == "memory") & (verdicts["mib"].astype(float) >= 64)
    assert large.any()
    assert not large.all()
    verdicts["ratio"] = 0.9
    verdicts.to_csv(run / "verdicts.csv", index=False)
    text = script(
        PAPER / "tables" / "slower_cells.py", run, tmp_path / "slower_cells.tex"
    ).read_text()
    cells = verdicts[large].drop_duplicates(["op", "case", "dtype", "pass"])
    assert text.count(" & 0.900 & ") == len(cells)
    # The op swiglu has a backward pass too, so no sentence counts its cells of both passes.
    assert (cells["pass"] == "both").any() and "Cells of both passes in one call" in text
    verdicts["ratio"] = 0.96
    verdicts.to_csv(run / "verdicts.csv", index=False)
    text = script(
        PAPER / "tables" / "slower_cells.py", run, tmp_path / "slower_cells.tex"
    ).read_text()
    assert "No such cell" in text


def by_events(run):
    """Make a copy of a run in which events timed all of sdpa_flash and one cell of torch_eager."""
    rows = pd.read_csv(run / "summary.csv", keep_default_na=False)
    verdicts = pd.read_csv(run / "verdicts.csv", keep_default_na=False)
    claims = pd.read_csv(run / "claims.csv", keep_default_na=False)
    for frame, column in ((rows, "impl"), (verdicts, "baseline"), (claims, "baseline")):
        frame.loc[frame[column] == "sdpa_flash", "timed_by"] = "events"
    one = (verdicts["baseline"] == "torch_eager") & (verdicts["op"] == "softmax")
    verdicts.loc[verdicts.index[one][0], ["timed_by", "ratio"]] = "events", 0.01
    rows.to_csv(run / "summary.csv", index=False)
    verdicts.to_csv(run / "verdicts.csv", index=False)
    claims.to_csv(run / "claims.csv", index=False)
    return verdicts


def test_times_by_events_stand_in_no_mean_and_are_marked(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    before = (run / "figures" / "attention.svg").read_text()
    verdicts = by_events(run)
    make_some = {"tables/claims", "tables/closest", "tables/families", "tables/slower_cells"}
    texts = {
        name: script(PAPER / f"{name}.py", run, run / f"{name}.tex").read_text()
        for name in make_some
    }
    for name in ("closest", "families", "slower_cells"):
        assert "0.01" not in texts[f"tables/{name}"].replace("0.010", "")
    each = texts["tables/claims"].partition("\\claimstable")[2]
    (line,) = [line for line in each.splitlines() if "sdpa" in line and "flash" in line]
    assert "$^\\ddagger$" in line and "A double dagger" in each
    assert "ddagger" not in (full / "tables" / "claims.tex").read_text()
    assert "A ring marks" in texts["tables/families"]
    assert "A ring marks" not in (full / "tables" / "families.tex").read_text()
    script(PAPER / "figures" / "attention.py", run, run / "figures" / "attention.pdf")
    assert (run / "figures" / "attention.svg").read_text() != before
    assert call("claims.py", run, run / "numbers.tex").returncode == 0
    verdicts = verdicts[verdicts["part"] == "headline"]
    graphs = verdicts[verdicts["timed_by"] == "graph"]
    least = graphs.groupby(["op", "case", "dtype", "pass"])["ratio"].min()
    found = numbers(run)
    assert found["closest"] == f"{np.exp(np.log(least).mean()):.3f}"
    assert found["comparisons"] == str(len(graphs))
    assert found["comparisons_events"] == str(len(verdicts) - len(graphs))


def test_drawn_shapes_stand_beside_the_grid_and_in_no_number_of_it(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    bare = script(PAPER / "tables" / "drawn.py", run, tmp_path / "bare.tex").read_text()
    assert "no drawn shapes" in bare and "tabular" not in bare
    verdicts = pd.read_csv(run / "verdicts.csv", keep_default_na=False)
    chosen = verdicts["op"].isin(["softmax", "dot"]) & (verdicts["dtype"] == "bfloat16")
    drawn = verdicts[chosen].assign(set="drawn", case=verdicts["case"] + "1")
    drawn["ratio"] = drawn["ratio"].astype(float) * 0.8
    pd.concat([verdicts, drawn]).to_csv(run / "verdicts.csv", index=False)
    rows = pd.read_csv(run / "summary.csv", keep_default_na=False)
    more = rows[rows["op"].isin(["softmax", "dot"]) & (rows["dtype"] == "bfloat16")]
    more = more.assign(set="drawn", case=more["case"] + "1")
    pd.concat([rows, more]).to_csv(run / "summary.csv", index=False)
    text = script(PAPER / "tables" / "drawn.py", run, tmp_path / "drawn.tex").read_text()
    lines = [line.split(" & ") for line in text.splitlines() if line.endswith(r" \\")]
    keys = ["op", "case", "dtype", "pass"]
    for op, pass_ in (("dot", "forward"), ("softmax", "backward")):
        sides = [
            frame[(frame["op"] == op) & (frame["pass"] == pass_)] for frame in (verdicts, drawn)
        ]
        expected = []
        for side in sides:
            least = side.sort_values("ratio").drop_duplicates(keys)
            counts = [sum(least["verdict"] == v) for v in ("better", "no difference", "worse")]
            counts.append(sum(least["verdict"] == "undecided"))
            mean = np.exp(np.log(least["ratio"].astype(float)).mean())
            expected += [str(len(least)), f"{mean:.3f}", "/".join(map(str, counts))]
        found = [line for line in lines if line[1] == pass_ and line[2] == expected[0]]
        assert any([*line[2:7], line[7].removesuffix(r" \\")] == expected for line in found), op
    assert "On " in text.partition("\\begin")[0]
    for name in ("closest", "claims", "families", "targets", "slower_cells"):
        again = script(PAPER / "tables" / f"{name}.py", run, tmp_path / f"{name}.tex").read_text()
        assert again == (full / "tables" / f"{name}.tex").read_text(), name
    assert call("claims.py", run, run / "numbers.tex").returncode == 0
    assert numbers(run) == numbers(full)


def test_a_table_is_split_only_if_no_page_holds_it():
    module = runpy.run_path(str(PAPER / "tables" / "_table.py"))
    for rows, kind in ((module["FLOAT_ROWS"], "table"), (module["FLOAT_ROWS"] + 1, "longtable")):
        text = module["captioned"]("l", ["op"], [["add"]] * rows, "Ops.", "tab:ops")
        assert f"\\begin{{{kind}}}" in text.partition("\\caption")[0]
        assert text.count("add") == rows


def test_the_twin_is_not_drawn_and_holes_are(full):
    table = (full / "tables" / "missing_times.tex").read_text().replace("\\allowbreak{}", "")
    assert "a\\_name \\& 100 \\% of \\#s" in table
    for path in full.glob("tables/*.tex"):
        assert "twin" not in path.read_text()


def test_a_library_that_offers_nothing_is_named_below_the_table(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    rows = pd.read_csv(run / "verification.csv", keep_default_na=False)
    none = rows["impl"].str.startswith("sdpa_")
    rows.loc[none, ["cells", "passed", "worst_ratio", "status"]] = 0, 0, None, "unsupported"
    rows.loc[none, "reason"] = rows["impl"].map("B1-S{} float16 forward: no driver".format)
    rows.to_csv(run / "verification.csv", index=False)
    out = script(PAPER / "tables" / "verification.py", run, tmp_path / "verification.tex")
    table, _, below = out.read_text().replace(r"\allowbreak{}", "").partition(r"\end{tabular}")
    assert "sdpa" not in table
    names = ", ".join(rf"\texttt{{sdpa\_{name}}}" for name in ("cudnn", "efficient", "flash"))
    assert f"Unsupported without a GPU: {names} (``no driver'')." in below


def test_how_calls_depart_from_a_librarys_default_stands_below_the_ledger(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    seen = pd.read_csv(run / "ledger.csv", dtype=str)
    table = run / "tables" / "ledger.tex"
    before = table.read_text().count("\\item")
    assert before == 1
    seen["settings"], seen["wide"] = seen["settings"].mask(seen.index >= 0, ""), ""
    quick = seen["impl"] == "torch_eager"
    seen.loc[quick & (seen["op"] == "dot"), "settings"] = "chunks of 2%"
    seen.loc[quick & (seen["op"] == "softmax"), "wide"] = "weight bias"
    seen.to_csv(run / "ledger.csv", index=False)
    said = script(PAPER / "tables" / "ledger.py", run, table).read_text()
    items = re.findall(r"\\item (.*)", said.replace(r"\allowbreak{}", ""))
    assert len(items) == 2
    assert items[0] == r"\texttt{torch\_eager}, \texttt{dot}: chunks of 2\%."
    assert r"\texttt{softmax}" in items[1] and items[1].endswith(
        r"timed call: \texttt{weight} and \texttt{bias}."
    )


def test_the_survey_says_where_it_read_a_library(full):
    table = (full / "tables" / "survey.tex").read_text()
    head = next(line for line in table.splitlines() if "shortstack" in line)
    assert [place in head for place in ("here", "installed", "read 2000-01-01")] == [True] * 3
    kernels = next(line for line in table.splitlines() if line.startswith("kernels"))
    # Ours first, then by name; the library of one function has no kernel.
    assert kernels.split(" & ")[1:] == ["1", "1", r"$\cdot$", r"1 \\"]


def test_the_report_is_whole_in_itself(full, tmp_path):
    done = call("report.py", full, tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report.html").read_text()
    assert synthetic.RUN_ID in text
    assert "replayed" in text
    assert "No available kernel: invented reason with a_name &amp; 100 % of #s" in text
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    families = {*synthetic.FAMILIES.values()}
    # Attention has a second figure. The headline, the survey and the matrix belong to no family.
    assert text.count("data:image/svg+xml") == len(families) + 4


def test_a_missing_csv_is_a_short_message(full, tmp_path):
    shutil.copy(full / "columns.json", tmp_path)
    done = call("figures/softmax.py", tmp_path, tmp_path / "softmax.pdf")
    assert done.returncode == 2
    assert "summary.csv: missing" in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_without_latex_the_build_says_what_to_install(full, tmp_path):
    done = call("build.py", full, tmp_path / "paper.pdf", PATH=str(tmp_path))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2
    assert "apt-get install" in done.stderr
    assert "latexmk" in done.stderr
    assert not (tmp_path / "paper.pdf").exists()


@pytest.mark.latex
@pytest.mark.parametrize("which", ["full", "reduced"])
def test_the_paper_compiles_without_overfull_lines(request, tmp_path, which):
    run = request.getfixturevalue(which)
    done = call("build.py", run, tmp_path / "paper.pdf")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "paper.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.latex
def test_a_figure_that_is_higher_than_a_page_fits_with_its_caption(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    figure = pyplot.figure(figsize=(6, 20))
    for name in ("rotary", "vector"):
        figure.savefig(run / "figures" / f"{name}.pdf")
    # One of the two loses its limit, and so its caption.
    families = run / "tables" / "families.tex"
    limited = r",height=[^]]*(?=\]{figures/vector})"
    families.write_text(re.sub(limited, "", families.read_text()))
    done = call("build.py", run, tmp_path / "paper.pdf")
    assert done.returncode == 0
    assert done.stdout.count("main.log: LaTeX Warning: Float too large") == 1


@pytest.mark.latex
def test_an_error_of_latex_is_named_with_its_log(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    (run / "tables" / "closest.tex").write_text("\\undefinedmacro\n")
    done = call("build.py", run, run / "paper.pdf")
    assert done.returncode == 2
    assert "closest.tex:1: Undefined control sequence" in done.stderr
    assert "main.log" in done.stderr


@pytest.mark.latex
def test_an_undefined_reference_fails(full, tmp_path):
    run = shutil.copytree(full, tmp_path / "run")
    with (run / "tables" / "families.tex").open("a") as table:
        table.write("See \\cref{tab:nowhere}.\n")
    done = call("build.py", run, run / "paper.pdf")
    assert done.returncode == 2
    assert "tab:nowhere" in done.stderr
