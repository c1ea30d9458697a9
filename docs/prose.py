"""Check the prose of pages and code: names each long or inverted sentence by file and line.

    python docs/prose.py [FILE …]

Without names it reads README.md, every Markdown file below docs/, the LaTeX below paper/, and the
docstrings and comments of the folders that `[tool.prose]` in pyproject.toml declares clean. A
sentence has at most 30 words and does not open with one of `OPENERS`, unless it asks
(docs/style.md). Code, tables, headings, the comments of a page and the addresses of links are not
read. Exit code 1 if a file has a fault.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 30
CODE = (".py", ".smk")
OPENERS = ("Of", "What", "Who", "Where", "Beside")

_SKIPPED = re.compile(r"^\s*(\||<|#|!\[|\$\$)")
_ITEM = re.compile(r"^\s*([-*+]|\d+[.)])\s+")
_FENCE = re.compile(r"^\s*(```|~~~)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")
# A sentence ends before a capital, a digit, an opening mark or code; "e.g. this" does not end one.
_END = re.compile(r"""(?<=[.!?])["')*_\]]*\s+(?=["'(*_\[]*[A-Z0-9`Φσ])""")
# LaTeX and what stands for it in Markdown, in the order of replacement; None leaves it out.
_TEX = (
    (re.compile(r"(?<!\\)%.*"), ""),
    (re.compile(r"\\begin\{(tabular|equation\*|tikzpicture)\}.*?\\end\{\1\}", re.DOTALL), None),
    (re.compile(r"\\\[.*?\\\]|\\tikzset\{.*?\n\}", re.DOTALL), None),
    (re.compile(r"^\s*\\(begin|end|(sub)*section|(doc|use|re)\w+|set\w+)\b.*", re.MULTILINE), "#"),
    (re.compile(r"^\s*\\(item|newcommand\{[^{}]*\}(\[\d\])?)", re.MULTILINE), "-"),
    (re.compile(r"\\[cC]ref\{[^{}]*\}|\$[^$]*\$|\\(result|code|num)\{[^{}]*\}"), "Code"),
    (re.compile(r"\\SI\{([^{}]|\{[^{}]*\})*\}\{[^{}]*\}"), "1"),
    (re.compile(r"\\(cite\w*|label|ref|input|inc\w+|when\w+)(\[[^]]*\])?\{[^{}]*\}"), ""),
    (re.compile(r"\\[a-zA-Z]+\*?(\[[^]]*\])?|[{}]|\\(?=[%&_])"), ""),
    (re.compile(r"~|\\[, ]"), " "),
)
_HEAD = re.compile(r'""".*?"""', re.DOTALL)
# Comments that speak to a tool.
_DIRECTIVE = re.compile(r"^#\s*(noqa|fmt:|ruff:|type:|pragma|!)")


def _blank(found):
    """Return the line breaks of a passage that is left out, so that line numbers stay true."""
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


def tex(text):
    """Return the prose of LaTeX as Markdown; a formula, a number or a reference is one word."""
    for pattern, word in _TEX:
        text = pattern.sub(_blank if word is None else word, text)
    return text


def docstrings(text):
    """Yield (line, text) of each paragraph of a docstring; indented lines are code or a formula."""
    for node in ast.walk(_parsed(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node) is None:
            continue
        first, indent = node.body[0].lineno, " " * node.body[0].col_offset
        head, *rest = node.body[0].value.value.split("\n")
        rest = [line.removeprefix(indent) for line in rest]
        prose = ["" if line.startswith("    ") else line for line in rest]
        yield from ((first - 1 + at, block) for at, block in blocks("\n".join([head, *prose])))


def _parsed(text):
    """Return the syntax tree of Python; of Snakemake's rules that of the docstring before them."""
    try:
        return ast.parse(text)
    except SyntaxError:
        head = _HEAD.match(text)
        return ast.parse(head[0] if head else "")


def comments(text):
    """Yield (line, text) of each comment; lines of their own that follow each other are one."""
    start, column, lines = 0, 0, []
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [token for token in tokens if token.type == tokenize.COMMENT]
    for token in [each for each in found if not _DIRECTIVE.match(each.string)]:
        row, place = token.start
        if lines and (row, place) == (start + len(lines), column) and _own(token):
            lines.append(token.string)
            continue
        if lines:
            yield start, "\n".join(lines)
        start, column, lines = row, place, [token.string]
    if lines:
        yield start, "\n".join(lines)


def _own(token):
    return not token.line[: token.start[1]].strip()


def code_blocks(text):
    """Yield (line, text) of each paragraph of the docstrings and comments of a file of code."""
    yield from docstrings(text)
    for start, comment in comments(text):
        plain = "\n".join(re.sub(r"^#+ ?", "", line) for line in comment.split("\n"))
        yield from ((start - 1 + at, block) for at, block in blocks(plain))


def sentences(found):
    """Yield (line, sentence) of blocks, with a code span as one word and a link as its text."""
    for start, block in found:
        block = _LINK.sub(lambda link: link[1] + "\n" * link[0][len(link[1]) :].count("\n"), block)
        block = _CODE.sub(lambda code: "`code`" + _blank(code), block)
        at = 0
        for end in [*(end.end() for end in _END.finditer(block)), len(block)]:
            yield start + block[:at].count("\n"), " ".join(block[at:end].split())
            at = end


def words(sentence):
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def faults(text, code=False):
    """Yield (line, reason, sentence) of each sentence that breaks a rule; code: not of a page."""
    for line, sentence in sentences(code_blocks(text) if code else blocks(text)):
        count = words(sentence)
        if count > LONGEST:
            yield line, f"{count} words", sentence
        first = re.match(r"\W*(\w+)", sentence.replace("**", ""))
        if first and first[1] in OPENERS and not sentence.endswith("?"):
            yield line, f"opens with {first[1]}", sentence


def pages(root=ROOT):
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def sections(root=ROOT):
    """Return the LaTeX files of the paper."""
    return sorted((root / "paper").rglob("*.tex"))


def sources(root=ROOT):
    """Return the files of Python and Snakemake in the folders that are declared clean."""
    declared = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    folders = declared["tool"]["prose"]["folders"]
    found = (path for folder in folders for path in sorted((root / folder).rglob("*")))
    return [path for path in found if path.suffix in CODE]


def check(paths, root=ROOT):
    """Print the faults of the files; 1 if there are any."""
    faulty = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        text = tex(text) if path.suffix == ".tex" else text
        for line, reason, sentence in sorted(faults(text, code=path.suffix in CODE)):
            faulty += 1
            print(f"{path.relative_to(root)}:{line}: {reason}: {sentence}")
    if faulty:
        print(f"{faulty} sentences to rewrite (docs/style.md)")
    return int(faulty > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    given = [path.resolve() for path in parser.parse_args().files]
    for path in given:
        if not (path.is_file() and path.is_relative_to(ROOT)):
            parser.error(f"{path}: no file of this project")
    sys.exit(check(given or [*pages(), *sections(), *sources()]))
