"""Check that a measurement that will not go on keeps its finished cells, and says what it lacks."""

import json

import pytest

from harness.cli import UserError
from harness.measure.checkpoint import Journal
from harness.measure.close import close
from harness.results import parts, raw
from tests.support.measuring import BLOCKS, BOARD, CELLS, interrupted, report, run

IMPLS = ["ours", "ours_twin", "slow"]
FIRST, SECOND = (cell.case.name for cell in CELLS)


@pytest.fixture
def journal(tmp_path):
    """The journal of a measurement that ended with its first cell."""
    return interrupted(tmp_path, IMPLS)


def test_finished_cells_keep_their_rows_and_the_others_are_unreached(journal, capsys):
    whole = json.loads(journal.read_text().splitlines()[1])["record"]
    capsys.readouterr()
    close(journal)
    assert capsys.readouterr().err.endswith(", 1 of 2 cells unreached\n")
    rows, sidecar = raw.read(journal.with_name("fake.csv"), "")
    first, second = ([row for row in rows if row["case"] == case] for case in (FIRST, SECOND))
    assert [row["device_us"] for row in first] == [row["device_us"] for row in whole["rows"]]
    assert len(first) == BLOCKS * len(IMPLS)
    assert [(row["impl"], row["status"], row["device_us"]) for row in second] == [
        (impl, "unreached", None) for impl in IMPLS
    ]
    assert {row["board"] for row in rows} == {BOARD}
    assert (sidecar["unreached"], sidecar["resumed"], sidecar["commit"]) == (1, 0, "c")
    assert sidecar["overhead"]["total_s"] == round(whole["spent_s"], 3)
    assert sum(sidecar["schedule"]["stopped"].values()) == 1
    assert sidecar["span"]["began"] <= sidecar["span"]["ended"]
    assert not journal.exists()


def test_a_closed_measurement_has_the_sidecar_of_one_that_ended(journal, tmp_path, timed):
    other = tmp_path / "other"
    journal.rename(tmp_path / ".fake.journal")
    timed(IMPLS)
    ended = json.loads((tmp_path / "raw/fake.json").read_text())
    assert ended["unreached"] == 0
    other.mkdir()
    (tmp_path / ".fake.journal").rename(other / ".fake.journal")
    close(other / ".fake.journal")
    closed = json.loads((other / "fake.json").read_text())
    assert set(ended) == set(closed)
    assert ended["environment"] == closed["environment"]
    assert set(ended["schedule"]) == set(closed["schedule"])


def test_a_torn_last_line_is_a_cell_that_was_not_reached(journal):
    with journal.open("a", encoding="utf-8") as file:
        file.write('{"what": "cell", "name": "M2 float32')
    close(journal)
    rows, sidecar = raw.read(journal.with_name("fake.csv"), "")
    assert sidecar["unreached"] == 1
    assert {row["status"] for row in rows if row["case"] == SECOND} == {"unreached"}


def test_one_that_was_taken_up_again_tells_how_often(journal, tmp_path, monkeypatch):
    def dies(*_):
        raise SystemExit(143)

    monkeypatch.setattr(Journal, "add", dies)
    with pytest.raises(SystemExit):
        run(tmp_path, IMPLS)
    close(journal)
    sidecar = raw.read(journal.with_name("fake.csv"), "")[1]
    assert sidecar["resumed"] == 1
    # When its last part began is not known.
    assert "span" not in sidecar


def test_an_implementation_that_was_refused_is_not_called_unreached(journal, tmp_path):
    report(tmp_path, "fake", "slow", CELLS[:1], status="inaccurate", reason="0.5")
    journal.unlink()
    close(interrupted(tmp_path, IMPLS))
    rows, _ = raw.read(journal.with_name("fake.csv"), "")
    second = {row["impl"]: row for row in rows if row["case"] == SECOND}
    assert [second[impl]["status"] for impl in IMPLS] == ["unreached", "unreached", "inaccurate"]
    assert second["slow"]["reason"] == "0.5"
    assert second["ours"]["impl_version"] == "0.9"


@pytest.mark.parametrize("ours", ["ok", "unsupported"])
def test_a_baseline_that_another_part_verifies_did_not_hang(tmp_path, ours):
    """Nor is its time of the other part lost where ours declines the cell."""
    cells = [
        {"case": cell.case.name, "dtype": cell.dtype, "pass": cell.pass_, "reason": ""}
        for cell in CELLS
    ]
    second = {"status": "unreached", "reason": parts.ELSEWHERE}
    for impl, last in (("ours", {"status": ours}), ("slow", second)):
        verdicts = [cells[0] | {"status": "ok"}, cells[1] | last]
        report(tmp_path, "fake", impl, CELLS, cells=verdicts)
    rows, sidecar = raw.read(run(tmp_path, IMPLS, others=frozenset([str(CELLS[1])])), "")
    found = {row["impl"]: row for row in rows if row["case"] == SECOND}
    own = "unreached" if ours == "ok" else ours
    assert [found[impl]["status"] for impl in IMPLS] == [own, own, "unreached"]
    assert found["slow"]["reason"] == "another part of the measurement times this cell"
    assert sidecar["unreached"] == 1


def test_measured_times_are_not_written_over(journal):
    out = journal.with_name("fake.csv")
    out.write_text("precious")
    with pytest.raises(UserError, match="holds measured times; move it away"):
        close(journal)
    assert (out.read_text(), journal.exists()) == ("precious", True)


def test_a_file_that_is_no_journal_is_named(tmp_path, journal):
    with pytest.raises(UserError, match="missing; a measurement that has ended leaves none"):
        close(tmp_path / "raw/.none.journal")
    assert not (tmp_path / "raw/.none.journal").exists()
    other = tmp_path / "other"
    for content in ("", "no line", '{"what": "cell", "name": "one", "record": {}}\n'):
        other.write_text(content)
        with pytest.raises(UserError, match="no journal of a measurement"):
            close(other)
    head, *cells = journal.read_text().splitlines(keepends=True)
    old = {key: value for key, value in json.loads(head).items() if key != "about"}
    other.write_text(json.dumps(old) + "\n" + "".join(cells))
    with pytest.raises(UserError, match="of an older version"):
        close(other)
    other.write_text(head)
    with pytest.raises(UserError, match="holds no time"):
        close(other)


def test_a_journal_that_a_job_writes_is_left_alone(journal):
    with Journal.found(journal), pytest.raises(UserError, match="another job is measuring this"):
        close(journal)
    assert journal.exists()
