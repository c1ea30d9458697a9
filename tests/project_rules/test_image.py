"""Check the image without building it: its files, its labels, and its start."""

import fnmatch
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
START = "requirements/start.sh"
NOBODY = 65534


@pytest.fixture
def image():
    """Make the image's folder as another user finds it; its Snakemake prints its arguments."""
    # The folders that pytest makes are closed to other users.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield furnished(Path(name) / "tilewright")


def furnished(folder):
    (folder / "results/recorded/h200").mkdir(parents=True)
    (folder / "results/recorded/h200/manifest.json").write_text("{}")
    (folder / "results/study").mkdir()
    (folder / "bin").mkdir()
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    said = '#!/bin/sh\necho "$*"; test -w "$HOME" && echo "$USER $LOGNAME"\n'
    (folder / "bin/snakemake").write_text(said)
    (folder / "bin/snakemake").chmod(0o755)
    for path in (folder, folder / "results", folder / "results/study"):
        path.chmod(0o777)
    return folder


def start(image, *words, home="/"):
    variables = {"PATH": f"{image}/bin:{os.environ['PATH']}", "HOME": home}
    # Root may do anything, so the test drops its rights; another user has them already.
    user = {"user": NOBODY, "group": NOBODY} if os.geteuid() == 0 else {}
    call = [str(image / START), *words]
    return subprocess.run(call, cwd=image, env=variables, capture_output=True, text=True, **user)


def test_a_user_whom_the_image_does_not_know_has_a_home_and_a_name(image):
    done = start(image, "--cores", "all")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["--cores all", "tilewright tilewright"]


@pytest.mark.parametrize("name", ["results/study", "results", "."])
def test_a_folder_that_may_not_be_written_is_named_in_one_line(image, name):
    (image / name).chmod(0o555)
    done = start(image)
    (image / name).chmod(0o777)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"tilewright: {name}") and "may not write there; run as --user" in line


def test_a_mount_that_hides_the_recorded_run_is_named(image):
    shutil.rmtree(image / "results/recorded")
    done = start(image)
    assert done.returncode == 2
    assert done.stderr == (
        "tilewright: results/recorded: not there; mount a folder on results/study instead of"
        " results\n"
    )


def ignored(path, rules):
    """Return whether Docker leaves a path out; the last rule that fits decides."""
    out, parts = False, path.split("/")
    heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    for rule in rules:
        pattern = rule.removeprefix("!")
        anywhere = pattern.removeprefix("**/")
        names = parts if pattern.startswith("**/") else heads
        if any(fnmatch.fnmatchcase(name, anywhere) for name in names):
            out = not rule.startswith("!")
    return out


def test_the_image_holds_what_is_named_and_nothing_else():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    for path in ("Snakefile", "kernels/softmax.py", "results/recorded/h200/raw/dot.csv"):
        assert (ROOT / path).exists() and not ignored(path, rules)
    for path in (".env", ".git/config", "secret.txt", "results/study/raw/dot.csv", ".venv/bin/x"):
        assert ignored(path, rules), path
    assert ignored("kernels/__pycache__/x.pyc", rules) and ignored("kernels/.env", rules)
    call = ["git", "-C", str(ROOT), "ls-files"]
    names = subprocess.run(call, capture_output=True, text=True).stdout.splitlines()
    left = {name for name in names if ignored(name, rules)}
    assert not {name for name in left if not name.startswith(".")}


def test_the_image_says_what_it_is_and_searches_no_current_folder():
    for label in ("source", "revision", "licenses", "base.name"):
        assert f"org.opencontainers.image.{label}=" in DOCKERFILE
    value = re.search(r"LD_LIBRARY_PATH=(\S+)", DOCKERFILE)[1]
    assert value.endswith("${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}}")
    assert f'ENTRYPOINT ["{START}"]' in DOCKERFILE
    assert os.access(ROOT / START, os.X_OK)
