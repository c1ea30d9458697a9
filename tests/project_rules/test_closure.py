"""Check that the code behind softmax is no more than docs/kernel-guide.md says."""

import re
from pathlib import Path

from tests.support.modules import loaded

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/kernel-guide.md").read_text(encoding="utf-8")
# The host code belongs to all families, and a few lines more or less change nothing for a reader.
SLACK = 0.05
closure = loaded(ROOT / "docs/closure.py")


def listed(name):
    """The last column of a row of the guide's table, as numbers."""
    [row] = re.findall(rf"^\| {name} `.*\|$", GUIDE, flags=re.MULTILINE)
    return tuple(int(number) for number in row.split("|")[-2].split(","))


def test_the_code_behind_the_main_kernel_is_listed():
    assert closure.rows(ROOT)["read"] == listed("read"), "change docs/kernel-guide.md"


def test_the_import_closure_does_not_grow_unseen():
    (files, lines), (most_files, most_lines) = closure.rows(ROOT)["run"], listed("run")
    message = f"{files} files, {lines} lines; shrink them, or change docs/kernel-guide.md"
    assert files <= most_files and abs(lines / most_lines - 1) <= SLACK, message


SOURCES = {
    "kernels/toy.py": """
from ._triton.parts import helper, unused
@jit
def main(x):
    \"\"\"Text, which does not count.\"\"\"
    return helper(x)  # nor this
""",
    "kernels/_triton/parts.py": """
from kernels._triton.more import LIMIT
@jit
def helper(x):
    return min(x,
               LIMIT)
def unused(x): return x
""",
    "kernels/_triton/more.py": "LIMIT = 3\n\nOTHER = 4\n",
}


def test_a_kernel_needs_the_definitions_that_it_names(tmp_path):
    for path, text in SOURCES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    assert closure.closure(tmp_path, "kernels/toy.py") == (3, 12)
    assert closure.device_code(tmp_path, "kernels/toy.py", "main") == (3, 3, 7)
