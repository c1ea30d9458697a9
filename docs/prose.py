"""Check the prose of the pages: names each long or inverted sentence by file and line.

    python docs/prose.py [FILE …]

Without names it reads README.md and every Markdown file below docs/. A sentence has at most 30
words and does not open with one of `OPENERS` (docs/style.md). Code, tables, headings, comments and
the addresses of links are not read. Exit code 1 if a page has a fault.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 30
OPENERS = ("Of", "What", "Who", "Beside")

_SKIPPED = re.compile(r"^\s*(\||<|#|!\[|\$\$)")
_ITEM = re.compile(r"^\s*([-*+]|\d+[.)])\s+")
_FENCE = re.compile(r"^\s*(```|~~~)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")
# A sentence ends before a capital, a digit, an opening mark or code; "e.g. this" does not end one.
_END = re.compile(r"""(?<=[.!?])["')*_\]]*\s+(?=["'(*_\[]*[A-Z0-9`Φσ])""")


def _blank(found):
    """The line breaks of what is left out, so that line numbers stay true."""
    return "\n" * found[0].count("\n")


def blocks(text):
    """Yield (line, text) of each paragraph and list item, without what is no prose."""
    text = _COMMENT.sub(_blank, text)
    fenced, start, lines = False, 0, []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = bool(_FENCE.match(line))
        ends = fence or fenced or not line.strip() or _SKIPPED.match(line) or _ITEM.match(line)
        if ends and lines:
            yield start, "\n".join(lines)
            lines = []
        if fence:
            fenced = not fenced
        elif not fenced and line.strip() and not _SKIPPED.match(line):
            start = start if lines else number
            lines.append(_ITEM.sub("", line) if not lines else line)


def sentences(text):
    """Yield (line, sentence) with a code span as one word and a link as its text."""
    for start, block in blocks(text):
        block = _LINK.sub(
            lambda found: found[1] + "\n" * found[0][len(found[1]) :].count("\n"), block
        )
        block = _CODE.sub(lambda found: "`code`" + _blank(found), block)
        at = 0
        for end in [*(found.end() for found in _END.finditer(block)), len(block)]:
            yield start + block[:at].count("\n"), " ".join(block[at:end].split())
            at = end


def words(sentence):
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def faults(text):
    """Yield (line, reason, sentence) of each sentence that breaks a rule."""
    for line, sentence in sentences(text):
        count = words(sentence)
        if count > LONGEST:
            yield line, f"{count} words", sentence
        first = re.match(r"\W*(\w+)", sentence.replace("**", ""))
        if first and first[1] in OPENERS:
            yield line, f"opens with {first[1]}", sentence


def pages(root=ROOT):
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def check(paths, root=ROOT):
    """Print the faults of the pages; 1 if there are any."""
    faulty = 0
    for path in paths:
        for line, reason, sentence in faults(path.read_text(encoding="utf-8")):
            faulty += 1
            print(f"{path.relative_to(root)}:{line}: {reason}: {sentence}")
    if faulty:
        print(f"{faulty} sentences to rewrite (docs/style.md)")
    return int(faulty > 0)


if __name__ == "__main__":
    sys.exit(check([Path(name).resolve() for name in sys.argv[1:]] or pages()))
