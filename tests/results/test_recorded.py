"""Check the recorded runs: whole, committed, interleaved, undisturbed and gated."""

import collections
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from harness import stats
from harness.machine import datasheets, environment
from harness.measure.__main__ import NETWORK_BLOCKS
from harness.project import registry
from harness.project.implementations import OURS, TWIN
from harness.results import manifest, parts, raw, times
from harness.summarize import timings

ROOT = Path(__file__).resolve().parents[2]
MACHINES = sorted((ROOT / "results/recorded").glob("*/raw"))
FEWEST_BLOCKS = 10
# Runs that wait for the times of further cells.
WAITING = sorted((ROOT / "results/parts").glob("*/raw"))
# For calls of at least LONG_US: the median and the 95 % quantile of the gap between
# two processes of the same code.
LONG_US, MEDIAN_GAP, MOST_GAP = 20.0, 0.005, 0.02
MOST_OVERHEAD = 0.3


@pytest.fixture(scope="module", params=MACHINES, ids=lambda raw: raw.parent.name)
def study(request):
    """Read rows and sidecar of each op; reading refuses files that differ from their digests."""
    return request.param.parent, times.measurements(request.param.parent)


def test_something_is_recorded():
    assert MACHINES


def test_the_manifest_lists_all_of_it_and_nothing_else(study):
    folder, ops = study
    manifest.check(folder, ops, {rows[0]["family"] for rows, _ in ops.values()})
    listed = json.loads((folder / manifest.NAME).read_text())["files"]
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(listed) == names - {manifest.NAME}


def test_each_op_was_measured_on_committed_code_and_by_the_rule(study):
    for op, (rows, sidecar) in study[1].items():
        fewest = NETWORK_BLOCKS if registry.of_network(op) else FEWEST_BLOCKS
        for part in parts.of(sidecar):
            assert (part["op"], part["mode"], part["dirty"]) == (op, "measured", False)
            assert re.fullmatch("[0-9a-f]{40}", part["commit"]), op
            schedule = part["schedule"]
            assert schedule["min_blocks"] >= fewest and schedule["interval"] <= 0.01, op
        found = collections.defaultdict(set)
        for row in rows:
            assert row["op"] == op
            found[row["case"], row["dtype"], row["pass"], row["block"]].add(row["order"])
        # Each implementation of a block has its own place in the order of that block.
        assert all(orders == set(range(len(orders))) for orders in found.values()), op
        ours = collections.Counter(
            (row["case"], row["dtype"], row["pass"])
            for row in rows
            if row["impl"] == OURS and row["status"] in raw.TIMED
        )
        assert ours and min(ours.values()) >= fewest, op


def test_parts_wait_beside_the_record_only_while_cells_are_missing():
    """A whole op belongs in a recorded run; until then the files must be those that came."""
    for folder in (path.parent for path in WAITING):
        ops = times.measurements(folder)
        manifest.check(folder, ops, {rows[0]["family"] for rows, _ in ops.values()})
        whole = [op for op, (_, sidecar) in ops.items() if not sidecar["unreached"]]
        assert ops and whole == [], f"{folder}: record these"


def unnamed(commits, history, text):
    """Return the commits that neither the history nor the text, by seven digits, contains."""
    absent = commits if history is None else commits - history
    return {commit for commit in absent if f"`{commit[:7]}`" not in text}


def git(*words):
    call = ["git", "-C", str(ROOT), *words]
    try:
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []


def test_a_recorded_commit_is_in_the_history_or_is_named(study):
    """Without the whole history the commit counts as known: it was checked when it was recorded."""
    commits = {part["commit"] for _, car in study[1].values() for part in parts.of(car)}
    whole = git("rev-parse", "--is-shallow-repository") == ["false"]
    text = (ROOT / "docs/reproduce.md").read_text()
    assert unnamed(commits, set(git("rev-list", "HEAD")) if whole else commits, text) == set()


def test_a_commit_that_is_nowhere_is_found():
    commits = {digit * 40 for digit in "abc"}
    assert unnamed(commits, {"a" * 40}, "the number `bbbbbbb` is not in it") == {"c" * 40}


def test_the_clock_is_named_by_its_digest_or_is_said_to_have_none(study):
    for op, (_, sidecar) in study[1].items():
        for part in parts.of(sidecar):
            assert re.fullmatch("[0-9a-f]{64}", part.get("harness_sha256", "0" * 64)), op


def test_no_time_counts_without_a_green_verification_on_a_gpu(study):
    folder, ops = study
    for op, (rows, _) in ops.items():
        timed = {
            (row["impl"].replace(TWIN, OURS), row["case"], row["dtype"], row["pass"])
            for row in rows
            if row["status"] in raw.TIMED
        }
        for impl in {key[0] for key in timed}:
            report = json.loads((folder / "verify" / op / f"{impl}.json").read_text())
            assert (report["op"], report["impl"], report["mode"]) == (op, impl, "gpu")
            green = {
                (impl, cell["case"], cell["dtype"], cell["pass"])
                for cell in report["cells"]
                if cell["status"] == "ok"
            }
            assert {key for key in timed if key[0] == impl} <= green


def test_two_processes_of_the_same_code_hardly_differ(study):
    gaps = []
    for rows, _ in study[1].values():
        for rivals in timings.group(rows).values():
            if {OURS, TWIN} <= set(rivals):
                twin, ours = timings.shared(rivals[TWIN], rivals[OURS])
                if ours and np.median(ours) >= LONG_US:
                    gaps.append(abs(stats.paired_ratio(twin, ours).value - 1))
    assert np.median(gaps) < MEDIAN_GAP
    assert np.quantile(gaps, 0.95) < MOST_GAP


def test_most_of_the_time_went_to_the_gpu(study):
    spent = [part["overhead"] for _, car in study[1].values() for part in parts.of(car)]
    used = sum(each["timed_s"] + each.get("first_s", 0.0) for each in spent)
    assert 1 - used / sum(each["total_s"] for each in spent) < MOST_OVERHEAD


def test_ceilings_are_measured_and_below_the_data_sheet(study):
    every = [(op, part) for op, (_, car) in study[1].items() for part in parts.of(car)]
    for op, sidecar in every:
        measured = [row for row in sidecar["ceilings"] if row["source"] == "measured"]
        found = {row["quantity"]: row["value"] for row in measured}
        assert {"read", "write", "copy", "bfloat16", "float16", "float32", "launch"} <= set(found)
        assert all(row["sm_mhz"] for row in measured), op
        sheet = datasheets.of(environment.model(sidecar["environment"]["gpu"]["name"]))
        assert not datasheets.beyond([(*row.values(),) for row in measured], sheet)


@pytest.mark.parametrize("name", ["config", "smoke"])
def test_a_study_replays_its_configurations(name):
    assert yaml.safe_load((ROOT / f"config/{name}.yaml").read_text())["tuning"] == "replay"


def test_the_study_times_as_is_said():
    timing = yaml.safe_load((ROOT / "config/config.yaml").read_text())["timing"]
    assert timing["min_blocks"] >= FEWEST_BLOCKS and timing["interval"] <= 0.01
