"""Check the image without building it: its files, its labels, and its start."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
START = "image/start.sh"
NOBODY = 65534
# The environment that `make sbom` makes.
SUPPLY = ROOT / ".setup/supply/bin/python"
HADOLINT = shutil.which("hadolint", path=f"{SUPPLY.parent}:{os.environ['PATH']}")


@pytest.fixture
def image():
    """Make the image's folder as another user finds it; its programs print their arguments."""
    # The folders that pytest makes are closed to other users.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield furnished(Path(name) / "study")


def furnished(folder):
    (folder / "recorded/hopper").mkdir(parents=True)
    (folder / "recorded/hopper/manifest.json").write_text("{}")
    (folder / "results/study").mkdir(parents=True)
    (folder / "results/recorded").symlink_to("../recorded")
    (folder / "bin").mkdir()
    shutil.copytree(ROOT / "image", folder / "image")
    for name in ("snakemake", "python", "bash"):
        said = f'#!/bin/sh\necho "{name} $*"; echo "$HOME,$USER,$LOGNAME"\n'
        (folder / "bin" / name).write_text(said)
        (folder / "bin" / name).chmod(0o755)
    for path in (folder / "results", folder / "results/study"):
        path.chmod(0o777)
    return folder


def start(image, *words, home="/", **variables):
    variables = {"PATH": f"{image}/bin:{os.environ['PATH']}", "HOME": home} | variables
    # Root may do anything, so the test drops its rights; another user has them already.
    user = {"user": NOBODY, "group": NOBODY} if os.geteuid() == 0 else {}
    # From another folder: Apptainer starts in that of the host.
    call = [str(image / START), *words]
    return subprocess.run(call, cwd="/", env=variables, capture_output=True, text=True, **user)


@pytest.mark.parametrize(
    ("words", "called"),
    [
        ((), "snakemake "),
        (("study",), "snakemake "),
        (("--cores", "4"), "snakemake --cores 4"),
        (("study", "-n"), "snakemake -n"),
        (("smoke", "-n"), "snakemake --configfile config/smoke.yaml -n"),
        (("compare", "a", "b c"), "python -m harness.compare a b c"),
        (("shell", "-c", "id"), "bash -c id"),
        (("test", "-q"), "python -m pytest -p no:cacheprovider -n 3 --dist worksteal -q"),
    ],
)
def test_each_command_starts_its_program(image, words, called):
    done = start(image, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == called


def test_a_word_that_is_no_command_is_answered_with_those_there_are(image):
    done = start(image, "rehearse")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "tilewright: rehearse is no command of this image; there are: study"
    )
    assert done.stderr.count("\n") == 1


def test_a_user_whom_the_image_does_not_know_has_a_home_and_a_name(image):
    done = start(image)
    home, user, login = done.stdout.splitlines()[1].split(",")
    assert (user, login) == ("tilewright", "tilewright")
    assert home not in ("", "/") and Path(home).is_dir()
    shutil.rmtree(home)


def test_without_a_place_for_caches_it_says_what_to_give(image):
    closed = image / "closed"
    closed.mkdir(mode=0o555)
    done = start(image, TMPDIR=str(closed))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "tilewright: /tmp: not writable; give it a place"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_home_where_nothing_may_be_executed_is_named(image):
    (image / "home").mkdir()
    call = ["mount", "-t", "tmpfs", "-o", "noexec,mode=1777", "tmpfs", str(image / "home")]
    if subprocess.run(call, capture_output=True).returncode:
        pytest.skip("this machine lets root mount nothing")
    try:
        done = start(image, home=str(image / "home"))
    finally:
        subprocess.run(["umount", str(image / "home")], check=True)
    assert done.returncode == 2 and "mount it with exec" in done.stderr


@pytest.mark.parametrize("name", ["results/study", "results"])
def test_a_folder_that_may_not_be_written_is_named_in_one_line(image, name):
    (image / name).chmod(0o555)
    done = start(image)
    (image / name).chmod(0o777)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"tilewright: {name}") and "may not write there; run as --user" in line


def test_a_mount_on_results_does_not_hide_the_recorded_run(image):
    shutil.rmtree(image / "results")
    (image / "results").mkdir()
    (image / "results").chmod(0o777)
    for _ in range(2):
        assert start(image).returncode == 0
        assert (image / "results/recorded/hopper/manifest.json").is_file()
    assert (image / "results/.snakemake").is_dir()


def test_a_record_of_the_host_is_left_as_it_is(image):
    (image / "results/recorded").unlink()
    (image / "results/recorded/mine").mkdir(parents=True)
    assert start(image).returncode == 0
    assert [path.name for path in (image / "results/recorded").iterdir()] == ["mine"]
    assert not (image / "results/recorded").is_symlink()


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


def rules():
    if not (ROOT / ".dockerignore").exists():
        pytest.skip("the image itself holds no hidden files, so not this list")
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_a_file_that_is_not_named_stays_outside():
    for path in ("Snakefile", "kernels/softmax.py", "results/recorded/hopper/raw/dot.csv"):
        assert (ROOT / path).exists() and not ignored(path, rules())
    for path in (".env", ".git/config", "secret.txt", "results/study/raw/dot.csv", ".venv/bin/x"):
        assert ignored(path, rules()), path
    assert ignored("kernels/__pycache__/x.pyc", rules()) and ignored("kernels/.env", rules())


def test_the_image_holds_every_file_that_git_knows_but_hidden_ones():
    """And but for measurements that wait for their other parts: nothing in the image reads them."""
    left = {name for name in tracked() if ignored(name, rules())}
    assert not {name for name in left if not name.startswith((".", "results/parts/"))}


def tracked():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git history: which files are the project's is not known")
    call = ["git", "-C", str(ROOT), "ls-files"]
    return subprocess.run(call, capture_output=True, text=True, check=True).stdout.splitlines()


def instructions(text=DOCKERFILE):
    """The instructions of the Dockerfile as (name, rest), without comments and folded lines."""
    plain = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    folded = plain.replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in folded.splitlines() if line.strip()]


def test_the_image_says_what_it_is_and_searches_no_current_folder():
    for label in ("source", "version", "revision", "licenses", "base.name"):
        assert f"org.opencontainers.image.{label}=" in DOCKERFILE
    value = re.search(r"LD_LIBRARY_PATH=(\S+)", DOCKERFILE)[1]
    assert value.endswith("${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}}")
    assert f'ENTRYPOINT ["/study/{START}"]' in DOCKERFILE
    assert os.access(ROOT / START, os.X_OK)
    assert "HEALTHCHECK" not in dict(instructions())


def test_both_bases_are_named_by_digest():
    bases = [rest for name, rest in instructions() if name == "ARG" and "IMAGE=" in rest]
    assert len(bases) == 2
    assert all(re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", rest) for rest in bases)


def test_all_that_pip_installs_in_the_image_is_held_by_hashes():
    calls = [part for _, rest in instructions() for part in rest.split("&&") if "pip " in part]
    assert len(calls) >= 4
    for call in calls:
        assert "--require-hashes" in call, call
    text = (ROOT / "requirements/flash-attn.sh").read_text().replace("\\\n", " ")
    calls = [line for line in text.splitlines() if "-m pip" in line]
    assert len(calls) == 2 and all("--require-hashes --no-deps" in call for call in calls)


def test_a_step_that_mounts_a_stage_runs_again_if_what_it_mounts_is_another():
    """buildah's cache looks at the files that are copied, and not at those that are mounted."""
    steps, mounted = instructions(), 0
    for number, (_, rest) in enumerate(steps):
        for stage in re.findall(r"--mount=type=bind,from=([\w-]+)", rest):
            mounted += 1
            _, before = steps[number - 1]
            listed = re.fullmatch(rf"--from={stage} /build/(\S+) requirements/", before)
            assert listed and f"-r requirements/{listed[1]}" in rest
    assert mounted


def test_older_builders_can_read_it():
    text = "\n".join(" ".join(pair) for pair in instructions())
    assert "<<" not in text and "--link" not in text and not re.match(r"#\s*syntax\s*=", DOCKERFILE)


def test_the_user_is_not_root_and_may_write_results_alone():
    names = [name for name, _ in instructions()]
    assert dict(instructions())["USER"] == "1001" and names.index("USER") > names.index("COPY")
    assert "chown" not in DOCKERFILE
    assert re.findall(r"install -d -m 1777 (\S+)", DOCKERFILE) == ["results"]


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint: make lint-image")
def test_hadolint_finds_nothing():
    subprocess.run([HADOLINT, str(ROOT / "Dockerfile")], check=True)


def test_the_wheel_of_flash_attn_is_compiled_from_the_source_that_the_lock_names(tmp_path):
    """Tools first, then the source alone; no binary is taken from elsewhere."""
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/sh\nfor last; do :; done\necho "$FLASH_ATTENTION_FORCE_BUILD $*" >>"$SAID"\n'
        'cat "$last" >>"$SAID.$(basename "$last")"\ncd / && ninja\n'
    )
    # As in the image: the environment is named by a relative path, and is not on PATH.
    (tmp_path / "ninja").write_text('#!/bin/sh\n: >"$SAID.ninja"\n')
    for tool in (fake, tmp_path / "ninja"):
        tool.chmod(0o755)
    said = tmp_path / "said"
    call = [str(ROOT / "requirements/flash-attn.sh"), "./python", "wheels"]
    subprocess.run(call, check=True, cwd=tmp_path, env=os.environ | {"SAID": str(said)})
    assert Path(f"{said}.ninja").exists()
    tools, source = said.read_text().splitlines()
    assert "pip install" in tools
    assert source.startswith("TRUE ") and "pip wheel" in source and "--no-build-isolation" in source
    parts = {kind: Path(f"{said}.{kind}.txt").read_text() for kind in ("tools", "source")}
    assert re.findall(r"^([\w-]+)==", parts["source"], re.M) == ["flash-attn"]
    assert "--hash=sha256:" in parts["source"]
    assert {"ninja", "wheel"} <= set(re.findall(r"^([\w-]+)==", parts["tools"], re.M))
    assert "flash-attn==" not in parts["tools"]


@pytest.mark.slow
@pytest.mark.skipif(not SUPPLY.exists(), reason="needs the tools of the supply chain: make sbom")
def test_the_bill_of_materials_names_both_kinds_of_packages_and_is_the_same_twice(tmp_path):
    made = []
    # To check the first one takes longer than to make both.
    unchecked = """
import runpy, sys
from cyclonedx.validation.json import JsonStrictValidator
JsonStrictValidator.validate_str = lambda self, text: None
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
    for name, how in (("first", []), ("second", ["-c", unchecked])):
        (tmp_path / name).mkdir()
        call = [SUPPLY, *how, ROOT / "image/sbom.py", "--environment", SUPPLY.parents[1]]
        subprocess.run([*call, "--out", tmp_path / name], check=True)
        made.append((tmp_path / name / "sbom.cdx.json").read_text())
    assert made[0] == made[1]
    parts = json.loads(made[0])["components"]
    kinds = {part["purl"].partition("/")[0] for part in parts}
    assert "pkg:pypi" in kinds and kinds <= {"pkg:pypi", "pkg:deb"}
    licences = (tmp_path / "first/licences.csv").read_text().splitlines()
    assert licences[0] == '"Name","Version","License","URL"'
    assert any(line.startswith('"pip-licenses"') for line in licences)


def test_compose_starts_what_the_page_promises():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert set(services) == {"study", "replay"}
    for service in services.values():
        assert service["read_only"] is True and service["network_mode"] == "none"
        assert service["volumes"] == ["./results:/study/results"]
        assert service["tmpfs"] == ["/tmp:exec,mode=1777"]
    [device] = services["study"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"] and "deploy" not in services["replay"]


def test_apptainer_starts_the_same_entry():
    text = (ROOT / "image/apptainer.def").read_text()
    assert f'exec /study/{START} "$@"' in text and text.count("/study/results") >= 2
