"""The rules of the house: sizes, imports, what may stand in a committed file."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness import discover

ROOT = Path(__file__).parents[1]
# A Python file has no limit: "one concept a file" is what a reader judges.
LIMITS = {".smk": 80, "Snakefile": 60}
# A home, a mount or a working folder of one machine, and the hosts of package registries.
MACHINE = re.compile(
    r"(?<![\w./<}])/(home|root|work|opt|Users|mnt|media|tmp/\w)[\w./-]*|\b[a-z]:\\Users"
    r"|pypi\.org|files\.pythonhosted|registry\.npmjs|download\.pytorch\.org|deb\.debian\.org"
)


def tracked():
    """The files of the project: those that git knows, else all that it would not ignore."""
    call = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        # The image and a source archive have none; there the checks of tracked files say nothing.
        pytest.skip("no git history: which files are the project's is not known")
    listed = subprocess.run(call, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


def paper_text():
    return "\n".join(path.read_text() for path in sorted((ROOT / "paper").rglob("*.tex")))


def test_no_file_outgrows_its_limit():
    sizes = {path: len(lines(path)) for path in tracked() if limit(path)}
    assert not {str(path): size for path, size in sizes.items() if size > limit(path)}


def limit(path):
    return LIMITS.get(path.suffix) or LIMITS.get(path.name)


def test_no_file_names_a_machine_or_a_registry():
    found = []
    for path in tracked():
        try:
            text = lines(path)
        except UnicodeDecodeError:
            continue
        name = path.relative_to(ROOT)
        found += [
            f"{name}:{n}: {line.strip()}" for n, line in enumerate(text, 1) if MACHINE.search(line)
        ]
    assert not found


def test_no_checkout_changes_the_ends_of_lines():
    call = ["git", "-C", str(ROOT), "check-attr", "text", *map(str, tracked())]
    listed = subprocess.run(call, capture_output=True, text=True, check=True).stdout.splitlines()
    assert listed and all(line.endswith(": text: unset") for line in listed)


def test_locks_hold_hashes_and_no_index():
    for source in (ROOT / "requirements").glob("*.in"):
        text = source.with_suffix(".txt").read_text()
        assert not re.search(r"^\s*(-|--)(i|f|index|extra-index|find-links|trusted)\b", text, re.M)
        assert "://" not in text
        pins = re.findall(r"^[\w.-]+(?:\[[\w,]+\])?==\S+", text, re.MULTILINE)
        blocks = re.split(r"^(?=[\w.-]+(?:\[[\w,]+\])?==)", text, flags=re.MULTILINE)[1:]
        assert len(pins) == len(blocks) > 0
        assert all("--hash=sha256:" in block for block in blocks)


def test_kernels_share_private_files_only():
    for stem in discover.stems(ROOT, "kernels"):
        for module in imported(ROOT / "kernels" / f"{stem}.py"):
            package, _, name = module.partition(".")
            assert package != "kernels" or name.startswith("_"), f"kernels/{stem}.py: {module}"


def test_the_paper_knows_none_of_our_code():
    for path in (ROOT / "paper").rglob("*.py"):
        packages = {module.partition(".")[0] for module in imported(path)}
        assert not packages & set(discover.PACKAGES), path.name


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module in discover.PACKAGES:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_every_table_is_cited_and_every_cited_one_is_made():
    assert cited("tables") == set(discover.stems(ROOT, "paper/tables"))


def test_every_figure_is_cited_and_every_cited_one_is_made():
    made = set(discover.stems(ROOT, "paper/figures"))
    # The table of the families cites the figure of each family, and `others` for the rest.
    by_family = {*discover.ops(ROOT).values(), "others"} if "families" in cited("tables") else set()
    assert cited("figures") <= made <= cited("figures") | by_family


def cited(kind):
    return set(re.findall(rf"\{{{kind}/(\w+)\}}", paper_text()))


def test_the_readme_shows_the_commands():
    text = (ROOT / "README.md").read_text()
    for command in ("make study", "make test", "snakemake --cores all"):
        assert command in text
