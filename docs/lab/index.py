"""Write the index of the lab book from the heads of its entries.

    python docs/lab/index.py [--check]

An entry is a section `## DATE: title` with five heads: Question, Change, Result, Decision, Commit.
The decision begins with one of `VERDICTS`. The index lists the entries by verdict, between the
markers of README.md. `--check` writes nothing and exits with 1 if the index is not current.
"""

import re
import sys
from pathlib import Path

BOOK = Path(__file__).resolve().parent
HEADS = ("Question", "Change", "Result", "Decision", "Commit")
VERDICTS = {
    "Kept": "The change is in the code.",
    "Dropped": "The change was tried and did not stay.",
    "Replaced": "The change was kept at first; a later one took its place.",
    "Observed": "A measurement or a record that asked for no change.",
    "Open": "No verdict yet: something is still to be measured.",
}
BEGIN, END = "<!-- index: begin -->", "<!-- index: end -->"
_ENTRY = re.compile(r"^## (\d{4}-\d\d-\d\d): (.+)$", re.MULTILINE)
_HEAD = re.compile(rf"^\*\*({'|'.join(HEADS)})\.\*\*(?: |$)", re.MULTILINE)
_COMMITS = re.compile(r"none|`[0-9a-f]{7}`(, `[0-9a-f]{7}`)*")


class IndexFault(Exception):
    """An entry that the index cannot take: what is wrong with it, and where."""


def entries(text, book):
    """The entries of one book, each a dict of its heads with `book`, `date` and `title`."""
    found = list(_ENTRY.finditer(text))
    if len(found) != len(re.findall(r"^## ", text, re.MULTILINE)) or not found:
        raise IndexFault(f"{book}: every section is an entry, `## DATE: title`")
    taken = []
    for entry, following in zip(found, [*found[1:], None], strict=True):
        body = text[entry.end() : following.start() if following else None]
        where = f"{book}: {entry[1]}: {entry[2]}"
        parts = _HEAD.split(body)
        if parts[0].strip() or tuple(parts[1::2]) != HEADS:
            raise IndexFault(
                f"{where}: the heads are {', '.join(HEADS)}, once each and in this order"
            )
        heads = {name: part.strip() for name, part in zip(parts[1::2], parts[2::2], strict=True)}
        if any(not part for part in heads.values()):
            raise IndexFault(f"{where}: a head is empty")
        verdict = re.match(r"\w+", heads["Decision"])
        if not verdict or verdict[0] not in VERDICTS:
            raise IndexFault(f"{where}: the decision begins with one of {', '.join(VERDICTS)}")
        if len(heads["Decision"].split()) < 3:
            raise IndexFault(f"{where}: the decision says why")
        if not _COMMITS.fullmatch(heads["Commit"]):
            raise IndexFault(f"{where}: the commit is `none` or short hashes")
        taken.append(
            heads | {"book": book, "date": entry[1], "title": entry[2], "verdict": verdict[0]}
        )
    return taken


def anchor(heading):
    """The address that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _row(entry):
    link = f"[{entry['title']}]({entry['book']}.md#{anchor(entry['date'] + ': ' + entry['title'])})"
    reason = " ".join(entry["Decision"].split()).removeprefix(entry["verdict"]).lstrip(":., ")
    reason = re.split(r"(?<=[.]) ", reason)[0].replace("|", "/")
    return f"| {entry['book']} | {link} | {reason[0].upper()}{reason[1:]} | {entry['Commit']} |"


def index(book=BOOK):
    """The generated part of README.md: entries by book, then a table for each verdict."""
    found = []
    for path in sorted(book.glob("*.md")):
        if path.stem != "README":
            found += entries(path.read_text(encoding="utf-8"), path.stem)
    lines = [f"| book | {' | '.join(v.lower() for v in VERDICTS)} |"]
    lines.append("| --- |" + " --: |" * len(VERDICTS))
    for name in dict.fromkeys(entry["book"] for entry in found):
        verdicts = [entry["verdict"] for entry in found if entry["book"] == name]
        lines.append(
            f"| [{name}]({name}.md) | {' | '.join(str(verdicts.count(v)) for v in VERDICTS)} |"
        )
    for verdict, meaning in VERDICTS.items():
        rows = [_row(entry) for entry in found if entry["verdict"] == verdict]
        if rows:
            lines += ["", f"## {verdict}", "", meaning, ""]
            lines += ["| book | entry | decision | commit |", "| --- | --- | --- | --- |", *rows]
    return "\n".join(lines)


def written(page, text):
    """The page with the text between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise IndexFault(f"README.md lacks the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(words):
    page = BOOK / "README.md"
    old = page.read_text(encoding="utf-8")
    try:
        new = written(old, index())
    except IndexFault as fault:
        print(f"docs/lab: {fault}", file=sys.stderr)
        return 2
    if old == new:
        return 0
    if "--check" in words:
        print("docs/lab/README.md is not current: run python docs/lab/index.py", file=sys.stderr)
        return 1
    draft = page.with_suffix(".part")
    draft.write_text(new, encoding="utf-8")
    draft.replace(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
