r"""Builds paper.pdf of a run: checks that each number cited exists, then runs latexmk.

The text cites numbers as `\result{key}`. A passage that may go without its numbers stands in
`\whenresult{key}{...}` and is printed only if the key exists. LaTeX works in `<run>/tex/`; the
PDF is renamed into place when it is whole.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import _data

PAPER = Path(__file__).parent
APT = "texlive-latex-recommended texlive-pictures texlive-latex-extra texlive-science latexmk"
OVERFULL_PT = 5
COMMENT = re.compile(r"(?<!\\)%.*")
INCLUDE = re.compile(r"\\(?:input|InputIfFileExists)\{([^}]+)\}")
CITED = re.compile(r"\\result\{([^}]+)\}")
GUARD = re.compile(r"\\whenresult\{([^}]+)\}")
DEFINED = re.compile(r"\\csname result@(\w+)\\endcsname")


def main(arguments) -> None:
    run = arguments.run.resolve()
    check(run)
    if not shutil.which("latexmk"):
        raise _data.PaperError(
            "latexmk: not found; everything but the PDF is made. To make it too, run\n"
            f"  sudo apt-get install --no-install-recommends {APT}"
        )
    pdf = compile_tex(run)
    with _data.whole_file(arguments.out) as temporary:
        shutil.copyfile(pdf, temporary)


def check(run: Path) -> None:
    """Raises PaperError that names key, file and line of each citation without a number."""
    numbers = run / "numbers.tex"
    try:
        known = set(DEFINED.findall(numbers.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise _data.PaperError(f"{numbers}: missing; run paper/claims.py first") from None
    missing = [
        f"{path}:{line}: \\result{{{key}}}: claims.yaml has no such key or no row supports it"
        for path, line, key in citations(run, PAPER / "main.tex", known)
        if key not in known
    ]
    if missing:
        raise _data.PaperError("\n".join(missing))


def citations(run: Path, path: Path, known: set[str]) -> Iterator[tuple[Path, int, str]]:
    """File, line and key of each citation that will be printed, through all files included."""
    text = COMMENT.sub("", path.read_text(encoding="utf-8"))
    text = _without_absent_passages(text, known)
    for match in CITED.finditer(text):
        if not match[1].startswith("#"):
            yield path, text.count("\n", 0, match.start()) + 1, match[1]
    for match in INCLUDE.finditer(text):
        for folder in (PAPER, run):
            included = folder / Path(match[1]).with_suffix(".tex")
            if included.is_file():
                yield from citations(run, included, known)


def _without_absent_passages(text: str, known: set[str]) -> str:
    r"""The text with the body of each `\whenresult` of an absent key blanked, lines kept."""
    for match in reversed(list(GUARD.finditer(text))):
        if match[1] not in known and not match[1].startswith("#"):
            end = _closing_brace(text, match.end())
            text = text[: match.end()] + "\n" * text.count("\n", match.end(), end) + text[end:]
    return text


def _closing_brace(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0 and text[place] == "}":
            return place + 1
    return len(text)


def compile_tex(run: Path) -> Path:
    """Runs latexmk; the path of the PDF. PaperError names the first error and the log."""
    scratch = run / "tex"
    # The files that latexmk remembers are those of the last build, wherever the run lay then.
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    search = f"{PAPER.resolve()}:{run}:"
    environment = os.environ | {
        "TEXINPUTS": search,
        "BIBINPUTS": search,
        "SOURCE_DATE_EPOCH": "0",
        "FORCE_SOURCE_DATE": "1",
        "max_print_line": "1000",
    }
    # No settings of a user's own, which may name another engine or another place.
    command = [
        "latexmk",
        "-norc",
        "-pdf",
        "-halt-on-error",
        "-interaction=nonstopmode",
        "-file-line-error",
    ]
    done = subprocess.run(
        [*command, "-outdir=.", str(PAPER.resolve() / "main.tex")],
        cwd=scratch,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    log = scratch / "main.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    for wrong in (r"^(!|\S+?:\d+: )", r"undefined on input line"):
        if found := next(filter(re.compile(wrong).search, lines), None):
            raise _data.PaperError(f"{found}\n  see {log}")
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no message"]
        raise _data.PaperError(f"latexmk: {last[0]}\n  see {log}")
    for line in lines:
        match = re.match(r"Overfull \\hbox \(([\d.]+)pt", line)
        wide = match and float(match[1]) > OVERFULL_PT
        # The caption of a float that is higher than its page lies below the page.
        if wide or line.startswith("LaTeX Warning: Float too large"):
            print(f"{log}: {line}")
    return scratch / "main.pdf"


if __name__ == "__main__":
    _data.run(main, "Builds the paper of a run.")
