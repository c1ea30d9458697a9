"""The forms of a kernel in the paper: rates, gains, and a paper without them."""

import re

import pandas as pd
import pytest

from harness.results import columns
from harness.summarize.__main__ import summarize
from tests.support import networks_run, synthetic
from tests.support.paper_scripts import PAPER, script

OPS = ("matmul", "attention")
FLOPS = 8 * 10**12
CELLS = {
    "matmul": [("M4096-N4096-K4096", "forward")],
    "attention": [("B4-H16-S4096-D128", "forward"), ("B4-H16-S4096-D128", "backward")],
}
# TFLOP/s of the forms; one has no time.
RATES = {"a plain loop": 100, "loads ahead": 250, "three groups": None, "as shipped": 500}


def rows(op):
    for case, pass_ in CELLS[op]:
        about = {"op": op, "case": case, "dtype": "bfloat16", "pass": pass_, "flops": FLOPS}
        if op == "matmul":
            # Older rows do not tell it.
            about |= {"gpu": "NVIDIA H200", "board": "GPU-1", "commit": "0123456789abcdef-dirty"}
        forms = [(rate, {"impl": "ours", "rung": n, "adds": adds})
                 for n, (adds, rate) in enumerate(RATES.items())]  # fmt: skip
        for rate, form in [*forms, (400, {"impl": "torch_eager"})]:
            if rate is None:
                yield about | form | {"status": "unsupported", "reason": "out of shared memory"}
                continue
            for block in range(3):
                us = FLOPS / rate / 1e6 * (1 + 0.01 * (block - 1))
                state = {"sm_mhz": 1700 + block, "temp_c": 50, "power_w": 600.0, "status": "ok"}
                yield about | form | state | {"block": block, "device_us": us}


def made(folder, full):
    run = synthetic.write_run(folder, ("dot",))
    for op in OPS if full else ():
        table = columns.DISSECTED[f"{op}_ladder"]
        networks_run.write(run / "dissect" / f"{table.name}.csv", table, rows(op))
    summarize(run, run / "recorded")
    for op in OPS:
        script(PAPER / f"figures/{op}_ladder.py", run, run / f"figures/{op}_ladder.pdf")
    script(PAPER / "tables/ladders.py", run, run / "tables/ladders.tex")
    return run


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    return made(tmp_path_factory.mktemp("shown"), full=True)


def test_the_caption_names_the_gpu_and_the_commit(shown):
    text = (shown / "tables/ladders.tex").read_text()
    assert (
        text.count("Taken on") == text.count("Taken on NVIDIA H200 at commit 0123456-dirty.") == 1
    )
    assert (
        text.index("Taken on") < text.index("tab:matmulladder") < text.index("tab:attentionladder")
    )


def test_a_row_has_its_rate_and_what_it_gains(shown):
    text = (shown / "tables/ladders.tex").read_text()
    assert r"loads ahead & 250 & 2.50 & 2.50 & 1701 & 600 \\" in text
    # Over the last form above that has a time, and over the first.
    assert r"as shipped & 500 & 2.00 & 5.00 & 1701 & 600 \\" in text
    assert r"three groups & \multicolumn{5}{l}{unsupported: out of shared memory} \\" in text
    assert text.count(r"\textbf{B4-H16-S4096-D128, bfloat16,") == 2
    assert r"\texttt{torch\_\allowbreak{}eager} & 400 &  &  & 1701 & 600 \\" in text


def test_a_figure_shows_each_form_and_why_one_has_no_time(shown):
    for op in OPS:
        drawn = (shown / f"figures/{op}_ladder.svg").read_text()
        assert all(adds in drawn for adds in RATES) and "does not fit" in drawn
        assert "<!-- 500 -->" in drawn and "torch_eager" in drawn and "TFLOP/s" in drawn


def test_the_medians_are_those_of_the_blocks_that_have_a_time(shown):
    found = pd.read_csv(shown / "matmul_ladder.csv")
    assert found["device_us"].notna().sum() == 12 and len(found) == 13


def test_a_run_without_forms_prints_nothing(tmp_path):
    run = made(tmp_path, full=False)
    text = (run / "tables/ladders.tex").read_text()
    commands = re.findall(r"\\newcommand\{\\(\w+)\}(?:\[1\])?\{(.*)\}", text)
    assert [name for name, _ in commands] == [
        "whenmatmulladder",
        "matmulladdertable",
        "whenattentionladder",
        "attentionladdertable",
    ]
    assert not any(body for _, body in commands)
    for op in OPS:
        section = (PAPER / f"sections/family_{op}.tex").read_text()
        assert f"\\when{op}ladder{{%" in section
        assert "no rows for this figure" in (run / f"figures/{op}_ladder.svg").read_text()
