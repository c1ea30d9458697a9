"""Check the pages: plain prose, links and names that exist, an index made of the entries."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.modules import loaded

ROOT = Path(__file__).parents[2]


prose, index = loaded(ROOT / "docs/prose.py"), loaded(ROOT / "docs/lab/index.py")
formats = loaded(ROOT / "docs/formats.py")
LONG = "One sentence " + " ".join(["goes"] * 28) + "."
ENTRY = """# Book

## 2026-11-21: a title (sm_90)

**Question.** Does it fit?

**Change.** None.

**Result.**

| a | b |
|---|---|

**Decision.** Observed: it fits. More is not known.

**Commit.** `0123456`
"""


def found(text):
    return [(line, reason) for line, reason, _ in prose.faults(text)]


def test_a_sentence_of_thirty_words_is_plain_and_one_more_is_not():
    assert found(LONG) == []
    assert found(LONG.replace("One", "Just one")) == [(1, "31 words")]


@pytest.mark.parametrize("word", prose.OPENERS)
def test_an_opening_word_is_named_where_its_sentence_begins(word):
    text = f"# {word} is a heading\n\nA sentence\nthat ends. {word} comes\nnext, says {word}.\n"
    assert found(text) == [(4, f"opens with {word}")]
    assert found(f"- **{word}** is a fault in a list too.") == [(1, f"opens with {word}")]


@pytest.mark.parametrize(
    "text",
    [
        f"```\n{LONG} {LONG}\nOf code.\n```\n",
        f"| {LONG[:-1]} and more | Of |\n",
        f"<!-- Of a comment.\n{LONG[:-1]} and more. -->\n",
        f"A [link]({'/'.join('abcdefghij')} {'of ' * 30}).",
        "A span `" + "x " * 40 + "` is one word.",
        "Offers, whatever and Whose are other words. Offer. Whoever. Besides.",
        "What is it? Where does it begin?",
    ],
)
def test_text_that_is_no_prose_and_a_question_are_not_faults(text):
    assert found(text) == []


CODE = f'''"""Do a thing.

Of the first paragraph.

    Of code that is indented.
"""


class Thing:
    """A thing."""

    # Plain,
    # and plain. Who goes
    # there.
    part = "# Of a string."  # What goes at the end.

    def method(self):
        """{LONG[:-1]} and more.

        - Where an item begins.
        """
        # noqa: Of a directive.
        text = """Of a string."""
        return text


# A comment without a point

# Beside another.
'''


def test_rules_of_snakemake_are_read_as_code(tmp_path, capsys):
    text = (
        '"""What holds."""\n\n\nrule all:\n    # Of a rule.\n    input:\n        "Of a string.",\n'
    )
    (tmp_path / "a.smk").write_text(text)
    assert prose.check([tmp_path / "a.smk"], tmp_path) == 1
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("a.smk:1: opens with What") and second.startswith("a.smk:5: opens with")
    names = {path.relative_to(ROOT).as_posix() for path in prose.sources()}
    assert "workflow/rules/every.smk" in names


def test_docstrings_and_comments_are_read_and_strings_are_not():
    read = sorted((line, reason) for line, reason, _ in prose.faults(CODE, code=True))
    assert read == [
        (3, "opens with Of"),
        (13, "opens with Who"),
        (15, "opens with What"),
        (18, "32 words"),
        (20, "opens with Where"),
        (29, "opens with Beside"),
    ]


def test_items_and_paragraphs_end_a_sentence_without_a_point():
    half = " ".join(["word"] * 20)
    assert found(f"- {half}\n- {half}\n\n{half}\n\n1. {half}\n") == []
    assert found(f"{half}\n{half}\n") == [(1, "40 words")]


def test_the_check_names_the_page_and_the_line(tmp_path, capsys):
    for name, text in {"a.md": "Plain.", "b.md": "\nOf that.", "c.md": "What now."}.items():
        (tmp_path / name).write_text(text)
    assert prose.check([tmp_path / "a.md"], tmp_path) == 0 and not capsys.readouterr().out
    assert prose.check(sorted(tmp_path.glob("*.md")), tmp_path) == 1
    told = capsys.readouterr().out
    assert "b.md:2: opens with Of: Of that." in told and "c.md:1: opens with What" in told


def test_the_pages_and_the_code_of_clean_folders_are_plain(capsys):
    found = prose.check([*prose.pages(), *prose.sections(), *prose.sources()])
    assert found == 0, capsys.readouterr().out


def test_latex_is_read_as_its_sentences(tmp_path, capsys):
    long = r"\textbf{A} word~and " + "more " * 27
    (tmp_path / "a.tex").write_text(
        "\\section{What is a section}\n% Of a comment\n"
        rf"\whenresult{{key}}{{{long}$x + y$ \result{{a}} end.}} Short \citep{{who}}."
        "\n\n\\begin{equation*}\nWhat = 1\n\\end{equation*}\n"
        "Of \\SI{\\result{a}}{\\watt} nothing.\n"
    )
    assert prose.check([tmp_path / "a.tex"], tmp_path) == 1
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("a.tex:3: 33 words: A word and more")
    assert second == "a.tex:8: opens with Of: Of 1 nothing."


def test_all_pages_and_all_files_of_clean_folders_are_read():
    names = {path.relative_to(ROOT).as_posix() for path in [*prose.pages(), *prose.sources()]}
    assert {"README.md", "docs/architecture.md", "docs/lab/softmax.md"} < names
    assert {"docs/prose.py", "baselines/liger.py", "tests/project_rules/test_docs.py"} < names


def test_a_folder_without_faults_is_declared():
    """The list of clean folders grows: a further one is added as soon as it can be."""
    folders = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[!.]*/*.py")}
    declared = {path.relative_to(ROOT).parts[0] for path in prose.sources()}
    clean = {
        folder
        for folder in folders - declared
        if not any(
            any(prose.faults(path.read_text(encoding="utf-8"), code=True))
            for path in (ROOT / folder).rglob("*.py")
        )
    }
    assert not clean, "pyproject.toml, tool.prose: add these folders"


def test_the_index_of_the_lab_book_is_current(capsys):
    assert index.main(["--check"]) == 0, capsys.readouterr().err


def test_the_tables_of_the_formats_are_current(capsys):
    assert formats.main(["--check"]) == 0, capsys.readouterr().err


def test_every_csv_file_and_every_schema_is_shown():
    wanted = {("columns", name) for name in formats.columns.TABLES}
    wanted |= {("schema", path.stem) for path in formats.schema.FOLDER.glob("*.json")}
    assert formats.shown(formats.PAGE.read_text(encoding="utf-8")) == wanted


def test_tables_that_are_not_current_are_told_and_made_anew(tmp_path, monkeypatch, capsys):
    page = tmp_path / "formats.md"
    monkeypatch.setattr(formats, "PAGE", page)
    parts = ["<!-- columns: ir -->", "a former row", "<!-- end -->"]
    parts += ["", "<!-- schema: tuned -->", "<!-- end -->", ""]
    page.write_text("\n".join(parts))
    assert formats.main(["--check"]) == 1 and "not current" in capsys.readouterr().err
    assert formats.main([]) == 0 and formats.main(["--check"]) == 0
    text = page.read_text()
    assert "| `stage` | text |  | form of the code: `ttir` or " in text
    assert "| `families.*.kernels.*.keys[].runner_up.tie` | boolean, or absent |" in text
    assert "a former row" not in text


def test_an_entry_is_a_row_under_its_verdict():
    (entry,) = index.entries(ENTRY, "book")
    assert (entry["verdict"], entry["date"]) == ("Observed", "2026-11-21")
    link = "[a title (sm_90)](book.md#2026-11-21-a-title-sm_90)"
    assert index._row(entry) == f"| book | {link} | It fits. | `0123456` |"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("**Change.** None.\n\n", "", "the heads are"),
        ("**Change.** None.", "**Change.** ", "a head is empty"),
        ("**Question.**", "Before. **Question.**", "the heads are"),
        ("Observed: it", "It", "begins with one of"),
        ("Observed: it fits. More is not known.", "Observed.", "says why"),
        ("`0123456`", "soon", "short hashes"),
        ("## 2026-11-21: a title", "## A title", "every section is an entry"),
    ],
)
def test_an_entry_that_lacks_something_is_named(old, new, words):
    assert ENTRY.count(old) == 1
    with pytest.raises(index.IndexFault, match=words):
        index.entries(ENTRY.replace(old, new), "book")


def test_an_index_that_is_not_current_is_told_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(index, "BOOK", tmp_path)
    monkeypatch.setattr(index, "index", lambda: "| new |")
    page = tmp_path / "README.md"
    page.write_text(f"Before\n{index.BEGIN}\nold\n{index.END}\nafter\n")
    assert index.main(["--check"]) == 1 and "old" in page.read_text()
    assert index.main([]) == 0 and index.main(["--check"]) == 0
    assert page.read_text() == f"Before\n{index.BEGIN}\n| new |\n{index.END}\nafter\n"
    page.write_text("no markers")
    assert index.main([]) == 2 and page.read_text() == "no markers"


def test_the_commits_of_the_lab_book_are_in_the_history():
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    if shutil.which("git") is None:
        pytest.skip("git is not installed, so the history cannot be read")
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("this copy has no git history, or only a part of it")
    text = index.index()
    hashes = sorted(set(re.findall(r"`([0-9a-f]{7})`", text)))
    assert hashes
    known = git("rev-list", "--all", "--abbrev-commit", "--abbrev=7").stdout.split()
    assert set(hashes) <= set(known), set(hashes) - set(known)


def test_the_links_between_pages_lead_somewhere():
    for page in prose.pages():
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for address in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" not in address:
                path, _, place = address.partition("#")
                target = (page.parent / path) if path else page
                assert target.exists(), (page.name, address)
                if place and target.suffix == ".md":
                    heads = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
                    assert place in map(index.anchor, heads), (page.name, address)


def test_the_glossary_names_files_that_there_are():
    rows = re.findall(r"^\| .+ \| (`.+`) \|$", (ROOT / "docs/glossary.md").read_text(), re.M)
    paths = {path for row in rows for path in re.findall(r"`([^`]+)`", row)}
    assert len(rows) > 30
    assert not {path for path in paths if not (ROOT / path).is_file()}


def test_the_map_has_every_room():
    text = (ROOT / "docs/map.md").read_text()
    rooms = {path.parent.name + "/" for path in (ROOT / "harness").glob("*/__init__.py")}
    files = {path.name for path in (ROOT / "harness").glob("[!_]*.py")}
    named = set(re.findall(r"`([\w.]+/?)`", "".join(re.findall(r"^\| (`.+?) \|", text, re.M))))
    assert rooms | files <= named and len(rooms) > 9
    assert {
        f"{room}/" for room in ("ops", "kernels", "baselines", "harness", "paper", "tests")
    } <= named


FOLDERS = (
    "baselines|cluster|config|docs|harness|image|kernels|network|ops|paper|requirements|results|tests"
    "|workflow"
)


def absent(text):
    """Return the files and modules that a page names without adding them, but that do not exist."""
    paths = set(re.findall(rf"`((?:{FOLDERS})/[\w./-]+\.\w+)`", text))
    added = set(re.findall(r"^`([\w./]+)`:$", text, re.M))
    modules = {name.replace(".", "/") for name in re.findall(r"\b(harness(?:\.\w+)+)", text)}
    # After the module a name may go on with a function, or with a class and its method.
    there = {
        name
        for name in modules
        if (ROOT / name).is_dir()
        or any((ROOT / f"{base}.py").is_file() for base in (name, *map(str, Path(name).parents)))
    }
    return {path for path in paths - added if not (ROOT / path).is_file()} | modules - there


def test_the_pages_name_files_and_modules_that_there_are():
    found = {page: absent(page.read_text(encoding="utf-8")) for page in prose.pages()}
    assert not {page.name: names for page, names in found.items() if names}


def test_a_file_or_module_that_is_gone_is_found():
    text = "`harness/gone.py`, `kernels/softmax.py`, harness.gone, harness.stats.median_interval."
    assert absent(text) == {"harness/gone.py", "harness/gone"}
    assert absent("`kernels/new.py`:\n") == set()


def commands(text):
    """Return the targets of make, and the rules of Snakemake, that a page names as code."""
    code = "\n".join(re.findall(r"```\n.*?```|`[^`\n]+`", text, re.DOTALL))
    return (
        set(re.findall(r"(?:^|`)make ([a-z-]+)", code, re.M)),
        set(re.findall(r"(?:^|`)snakemake [^#\n`]*?--cores all ([a-z]+)\b(?!/)", code, re.M)),
    )


def test_the_commands_of_the_pages_exist():
    named = [commands(page.read_text(encoding="utf-8")) for page in prose.pages()]
    made, asked = (set().union(*found) for found in zip(*named, strict=True))
    assert {"study", "record"} <= made and {"verified", "measured", "sanitized"} <= asked
    makefile = (ROOT / "Makefile").read_text()
    targets = " ".join(re.findall(r"^([a-z -]+):(?!=)", makefile, re.M)).split()
    assert made <= set(targets), "no such target of make"
    rules = "".join(
        path.read_text() for path in [ROOT / "Snakefile", *ROOT.glob("workflow/**/*.smk")]
    )
    assert asked <= set(re.findall(r"^rule (\w+):", rules, re.M)), "no such rule of Snakemake"


def test_the_commands_of_a_page_are_found():
    text = (
        "`make a` makes b.\n\n```\nmake c   # make d\nsnakemake --cores all e --config f=g\n```\n"
    )
    assert commands(text) == ({"a", "c"}, {"e"})


def test_names_of_tests_begin_with_their_subject():
    opened = re.compile(rf"^def test_(?:{'|'.join(prose.OPENERS).lower()})_\w+", re.M)
    assert opened.findall("def test_of_it_all():") and not opened.findall("def test_office():")
    found = {
        path.relative_to(ROOT).as_posix(): opened.findall(path.read_text(encoding="utf-8"))
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    ("script", "word", "message"),
    [
        ("formats", "--chek", "unrecognized arguments: --chek"),
        ("rooms", "--chek", "unrecognized arguments: --chek"),
        ("prose", "gone.md", "gone.md: no file of this project"),
        ("closure", "gone", "gone/kernels/softmax.py: no such file"),
    ],
)
def test_a_mistaken_word_of_a_script_is_named(script, word, message):
    call = [sys.executable, str(ROOT / f"docs/{script}.py"), word]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
