"""Check the paper of a run with little in it: without rival times, times or cells."""

import shutil

import pandas as pd
import pytest

from harness.summarize.__main__ import summarize
from tests.support import synthetic
from tests.support.paper_scripts import call, make


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The op dot has no rivals, scale no cell, and tanh is built and verified but has no times."""
    run = synthetic.write_run(tmp_path_factory.mktemp("bare"), ("dot",))
    alone = [row for row in synthetic.rows_of("dot", 0) if row["impl"].startswith("ours")]
    synthetic.write_raw(run, "dot", alone)
    synthetic.write_raw(run, "scale", [])
    synthetic._report(run, "scale", "ours", "gpu")
    synthetic._report(run, "tanh", "ours", "gpu")
    synthetic._report(run, "tanh", "torch_eager", "gpu")
    synthetic._build(run, "activation")
    summarize(run, run / "recorded", untimed=["tanh"])
    return make(run)


def test_an_op_without_times_stands_among_what_was_verified_and_built(bare):
    verified = pd.read_csv(bare / "verification.csv").set_index("op")
    assert set(verified.index) == {"dot", "scale", "tanh"}
    assert set(verified.loc["tanh", "family"]) == {"activation"}
    text = (bare / "tables/verification.tex").read_text()
    assert r"\texttt{tanh}" in text and r"\texttt{scale}" in text
    assert "activation" in (bare / "tables/resources.tex").read_text()
    assert "tanh" in (bare / "capabilities.csv").read_text()
    assert "tanh" not in (bare / "summary.csv").read_text()


def test_the_paper_of_such_a_run_builds(bare):
    done = call("build.py", bare, bare / "paper.pdf")
    assert "claims.yaml has no such key" not in done.stderr, done.stderr
    assert "Error" not in done.stderr, done.stderr
    if shutil.which("latexmk"):
        assert done.returncode == 0, done.stderr
        assert (bare / "paper.pdf").read_bytes().startswith(b"%PDF")


def test_the_report_of_such_a_run_is_whole(bare):
    done = call("report.py", bare, bare / "report.html")
    assert done.returncode == 0, done.stderr
    assert "tanh" in (bare / "report.html").read_text()
