"""Check which files a command is said to consist of."""

import re
from pathlib import Path

import pytest

from harness.project import source_tree

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r'^\w*WORKER = "([\w.]+):\w+"$', re.MULTILINE)
COMMANDS = {
    path.relative_to(ROOT).as_posix(): NAMED.findall(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "harness").rglob("*.py"))
}


@pytest.mark.parametrize("command", [name for name, found in COMMANDS.items() if found])
def test_the_workers_that_a_command_starts_by_name_are_sources_of_it(command):
    """Otherwise an edit of a worker would leave what it made as it is."""
    found = source_tree.sources(ROOT, command)
    for worker in COMMANDS[command]:
        assert f"{worker.replace('.', '/')}.py" in found


def test_a_module_named_in_a_string_is_a_source_with_or_without_what_is_in_it(tmp_path):
    for name in ("start", "plain", "worker", "kept"):
        (tmp_path / "harness").mkdir(exist_ok=True)
        (tmp_path / f"harness/{name}.py").write_text("")
    text = '"harness.plain", "harness.worker:Class.method", "run harness.kept", "harness.absent:X"'
    (tmp_path / "harness/start.py").write_text(f"NAMES = [{text}]\n")
    found = source_tree.sources(tmp_path, "harness/start.py")
    assert found == ["harness/plain.py", "harness/start.py", "harness/worker.py"]
