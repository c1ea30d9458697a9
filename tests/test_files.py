"""Check files that are written whole, and the message that a failed write leaves."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness import cli, files

ROOT = Path(__file__).parents[1]
# A limit on the size of files stands for a full disk: the write fails half-way, without a name.
FULL_DISK = """
import resource, sys
from harness import cli, files

resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
cli.run(lambda: files.write_text(sys.argv[1], "x" * 100_000))
"""


def test_a_file_is_renamed_into_place_when_it_is_whole(tmp_path):
    path = tmp_path / "folder" / "file.json"
    files.write_json(path, {"a": 1})
    assert files.read_json(path, "write it again") == {"a": 1}
    with pytest.raises(KeyboardInterrupt), files.whole_file(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert files.read_json(path, "write it again") == {"a": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_an_interrupted_command_ends_without_a_traceback(capsys):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        cli.run(interrupted)
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


def test_a_fault_of_the_command_is_no_verdict(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: 1 // 0)
    assert ended.value.code not in (0, 1, 2, 3)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_full_disk_is_a_message_that_names_the_file(tmp_path):
    path = tmp_path / "file.csv"
    call = [sys.executable, "-c", FULL_DISK, str(path)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"tilewright: {path}: File too large\n"
    assert not list(tmp_path.iterdir())


def test_a_reader_who_has_read_enough_is_no_fault():
    script = "from harness import cli; cli.run(lambda: print('line\\n' * 100_000))"
    call = f'"{sys.executable}" -c "{script}" | head -1; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", call], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["line", str(cli.CLOSED)]
    assert done.stderr == ""
