"""Check that a user's preferences change no document, and that broken files give one message."""

import contextlib
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.summarize.__main__ import summarize
from tests.support import synthetic
from tests.support.paper_scripts import FIGURES, PAPER, TABLES

PREFERENCES = "lines.linewidth: 9\nfont.size: 31\naxes.facecolor: red\nsvg.fonttype: none\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = synthetic.write_run(tmp_path_factory.mktemp("run"), ("dot", "softmax"))
    summarize(folder, folder / "recorded")
    return folder


@pytest.mark.parametrize("preferences", [PREFERENCES, "text.usetex: True\n"])
def test_a_users_matplotlib_changes_no_figure(run, tmp_path, preferences):
    drawn = {}
    for name, text in (("plain", ""), ("own", preferences)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "matplotlibrc").write_text(text)
        out = tmp_path / name / "headline.pdf"
        command = [sys.executable, PAPER / "figures/headline.py", "--run", run, "--out", out]
        home = {"MPLCONFIGDIR": str(tmp_path / name)}
        subprocess.run(command, env=os.environ | home, check=True, cwd=tmp_path / name)
        drawn[name] = out.with_suffix(".svg").read_bytes(), out.read_bytes()
    assert drawn["plain"] == drawn["own"]


@pytest.mark.latex
def test_a_users_latexmk_builds_the_same_paper(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    own = "$pdflatex = 'false';\n$bibtex_use = 0;\n$jobname = 'other';\n$out_dir = 'elsewhere';\n"
    (tmp_path / "home/.latexmkrc").write_text(own)
    for place in ("paper", "run"):
        (tmp_path / place).mkdir()
    text = r"\documentclass{article}\begin{document}Hello.\end{document}"
    (tmp_path / "paper/main.tex").write_text(text)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(str(PAPER))
    build = runpy.run_path(str(PAPER / "build.py"))
    build["compile_tex"].__globals__["PAPER"] = tmp_path / "paper"
    found = build["compile_tex"](tmp_path / "run")
    assert found == tmp_path / "run/tex/main.pdf"
    assert found.read_bytes().startswith(b"%PDF")


BROKEN = {"binary": b"\0\xff\x80 no text", "other": b"a,b\n1,2\n", "empty": b""}
SCRIPTS = [
    *(f"figures/{name}.py" for name in FIGURES),
    *(f"tables/{name}.py" for name in TABLES),
    *("claims.py", "readme.py", "report.py"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["summary", "verdicts"])
def test_all_scripts_report_a_broken_file_by_the_same_line(run, tmp_path, capfd, name):
    """Many jobs fail then, and the end of a study prints each message once."""
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "README.md").write_text("<!-- results: begin -->\n<!-- results: end -->\n")
    reading = SCRIPTS
    for content in BROKEN.values():
        (folder / f"{name}.csv").write_bytes(content)
        # A script that does not open the file does so whatever is in it.
        reading = reported(folder, name, capfd, reading)


def reported(folder, name, capfd, scripts):
    """Run scripts on a run whose file is broken; return those that open it."""
    said, failed, opened = set(), 0, []
    for path in scripts:
        out = folder / ("README.md" if path == "readme.py" else f"out{Path(path).suffix}")
        with seen(folder / f"{name}.csv") as openings:
            code = ended(PAPER / path, "--run", folder, "--out", out)
        opened += [path] * bool(openings)
        text = capfd.readouterr().err
        assert code in (0, 2), f"{path}: {text}"
        if code:
            assert openings, path
            failed += 1
            said.add(text)
    assert failed > 3
    (line,) = said
    assert line.startswith(f"tilewright: {folder}/{name}.csv: ") and line.count("\n") == 1
    assert line.endswith("; remove it and run the study again\n")
    return opened


# A hook of Python's cannot be taken away.
WATCHED = {}


def audited(event, arguments):
    if event == "open" and str(arguments[0]) in WATCHED:
        WATCHED[str(arguments[0])].append(event)


@contextlib.contextmanager
def seen(path):
    """Collect the openings of a file in the body."""
    if not WATCHED:
        sys.addaudithook(audited)
    WATCHED[str(path)] = []
    yield WATCHED[str(path)]


def ended(path, *words):
    """Return the exit code of a script that runs in this process; a traceback fails the test."""
    before = sys.argv, list(sys.path)
    sys.argv = [str(path), *map(str, words)]
    # The first script of a process imports its own modules, which adds the folder above to the
    # path.
    sys.path[:0] = [str(path.parent), str(PAPER)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    finally:
        sys.argv, sys.path[:] = before
    return 0
