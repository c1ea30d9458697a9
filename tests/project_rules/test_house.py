"""Check the rules of the house: sizes, imports, and what a committed file may contain."""

import ast
import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from harness.study import jobs

ROOT = Path(__file__).parents[2]
# A Python file has no limit: a reader judges whether it holds one concept.
LIMITS = {".smk": 80, "Snakefile": 60}
# Home, mount and working folders of one machine, and the hosts of package registries.
MACHINE = re.compile(
    r"(?<![\w./<}])/(home|root|work|opt|Users|mnt|media|tmp/\w)[\w./-]*|\b[a-z]:\\Users"
    r"|pypi\.org|files\.pythonhosted|registry\.npmjs|download\.pytorch\.org|deb\.debian\.org"
)


def tracked():
    """Return the files of the project: those that git tracks or would not ignore."""
    call = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        # The image and a source archive have no git history.
        pytest.skip("no git history here, so the files of the project are not known")
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


def test_the_citation_is_that_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for key in ("version", "license"):
        assert citation[key] == package[key]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in package["authors"]
    ]
    assert {"cff-version", "title", "message", "date-released"} <= set(citation)


def test_locks_hold_hashes_and_no_index():
    for source in (ROOT / "requirements").glob("*.in"):
        text = source.with_suffix(".txt").read_text()
        assert not re.search(r"^\s*(-|--)(i|f|index|extra-index|find-links|trusted)\b", text, re.M)
        assert "://" not in text
        pins = re.findall(r"^[\w.-]+(?:\[[\w,]+\])?==\S+", text, re.MULTILINE)
        blocks = re.split(r"^(?=[\w.-]+(?:\[[\w,]+\])?==)", text, flags=re.MULTILINE)[1:]
        assert len(pins) == len(blocks) > 0
        assert all("--hash=sha256:" in block for block in blocks)


@pytest.mark.parametrize("room", ["ops", "kernels"])
def test_families_share_private_files_only(room):
    for stem in jobs.stems(ROOT, room):
        for module in imported(ROOT / room / f"{stem}.py"):
            package, _, name = module.partition(".")
            assert package != room or name.startswith("_"), f"{room}/{stem}.py: {module}"


def test_a_family_has_a_problem_and_kernels():
    assert jobs.stems(ROOT, "ops") == jobs.stems(ROOT, "kernels")


def test_the_paper_knows_none_of_our_code():
    for path in (ROOT / "paper").rglob("*.py"):
        packages = {module.partition(".")[0] for module in imported(path)}
        assert not packages & set(jobs.PACKAGES), path.name


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module in jobs.PACKAGES:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def parents():
    """Return the modules that a contract in pyproject.toml keeps from importing torch."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [contract] = [c for c in declared["contracts"] if c["name"].startswith("Parents")]
    return contract["source_modules"]


@pytest.mark.parametrize("module", parents())
def test_no_parent_imports_torch(module):
    code = f"import sys, {module}; print({{'torch', 'triton'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def rooms_of_kernels():
    """Each room below kernels/ ("" for the families themselves), and the rooms that it imports."""
    found = {}
    for path in (ROOT / "kernels").rglob("*.py"):
        package = path.relative_to(ROOT).parts[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                above = package[: len(package) - node.level + 1]
                module = [*above, *filter(None, (node.module or "").split("."))]
                room = (
                    module[1] if len(module) > 1 and (ROOT.joinpath(*module[:2])).is_dir() else ""
                )
                found.setdefault("".join(package[1:]), set()).add(room)
    return found


def test_code_that_families_of_kernels_share_knows_no_family():
    found = rooms_of_kernels()
    details = {name for name in found if name.endswith("_details")}
    assert set(found) == {"", "_runtime", "_triton", *details}
    assert found["_runtime"] <= {"_runtime"}
    assert found["_triton"] <= {"_runtime", "_triton"}
    assert not [name for name in details if "" in found[name]], "a part of a family imports it"


def test_a_room_opens_with_its_purpose_alone():
    for path in (ROOT / "harness").rglob("__init__.py"):
        [purpose] = ast.parse(path.read_text()).body
        assert isinstance(purpose.value.value, str), path


def imports_of_tests():
    """Yield each file below tests/ with the test modules that it imports."""
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for path in (ROOT / "tests").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            named = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                named = [node.module or "", *(alias.name for alias in node.names)]
            found = {name.rpartition(".")[2] for name in named} & tests
            if found:
                yield path.relative_to(ROOT).as_posix(), found


def test_no_test_module_imports_another():
    assert not dict(imports_of_tests()), "what tests share belongs in tests/support/"


def test_each_test_module_has_a_name_of_its_own():
    """Folders of tests are no packages, so pytest cannot collect two modules of one name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}


def test_no_room_of_the_tests_is_passed_over(pytestconfig):
    skipped = pytestconfig.getini("norecursedirs")
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert not [name for name in folders for each in skipped if fnmatch.fnmatch(name, each)]


def test_a_room_of_the_tests_is_one_of_the_project():
    packages = [*ROOT.glob("*/__init__.py"), *ROOT.glob("src/*/__init__.py")]
    packages += (ROOT / "harness").glob("*/__init__.py")
    rooms = {path.parent.name for path in packages} - {"harness"}
    rooms |= {"paper", "conformance", "gpu", "cluster", "project_rules"}
    assert {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")} <= rooms


def test_every_table_is_cited_and_every_cited_one_is_made():
    assert cited("tables") == set(jobs.stems(ROOT, "paper/tables"))


def test_every_figure_is_cited_and_every_cited_one_is_made():
    made = set(jobs.stems(ROOT, "paper/figures"))
    # The table of the families cites the figure of each family, and `others` for the rest.
    by_family = {*jobs.ops(ROOT).values(), "others"} if "families" in cited("tables") else set()
    assert cited("figures") <= made <= cited("figures") | by_family


def cited(kind):
    return set(re.findall(rf"\{{{kind}/(\w+)\}}", paper_text()))


def test_the_readme_shows_the_commands():
    text = (ROOT / "README.md").read_text()
    for command in ("make study", "make test", "snakemake --cores all"):
        assert command in text
