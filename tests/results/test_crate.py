"""The export of a finished run: what it holds, and that a wrong one is refused."""

import json
import sys
import zipfile

import pytest

from harness.cli import UserError
from harness.results import crate
from harness.summarize.__main__ import summarize
from tests.support import synthetic

NEEDS = "needs rocrate: make crate"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = synthetic.write_run(tmp_path_factory.mktemp("run"), ("dot", "softmax"))
    summarize(folder, folder / "recorded")
    (folder / "report.html").write_text("<html></html>")
    for name in ("logs/a.log", ".hidden", "raw/.dot.journal", "a name ä/x y.csv"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("1\n")
    return folder


def metadata(archive):
    with zipfile.ZipFile(archive) as file:
        graph = json.loads(file.read("ro-crate-metadata.json"))["@graph"]
        return {entity["@id"]: entity for entity in graph}, set(file.namelist())


def test_a_crate_holds_the_run_and_says_what_each_file_is(run, tmp_path):
    pytest.importorskip("rocrate", reason=NEEDS)
    out = tmp_path / "run.crate.zip"
    count = crate.export(run, out)
    entities, held = metadata(out)
    assert len(held) == count + 1
    assert {"config.yaml", "summary.csv", "raw/dot.csv", "a name ä/x y.csv"} <= held
    assert not {"logs/a.log", ".hidden", "raw/.dot.journal"} & held
    assert entities["report.html"]["encodingFormat"] == "text/html"
    root = entities["./"]
    environment = json.loads((run / "environment.json").read_text())
    assert environment["run_id"] in root["name"]
    assert root["license"] == {"@id": crate.LICENCE}
    [action] = [entity for entity in entities.values() if entity["@type"] == "CreateAction"]
    assert {"@id": "raw/dot.csv"} in action["result"]
    assert environment["commit"] in entities["#tilewright"]["softwareVersion"]
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_file_that_changes_while_it_is_exported_is_noticed(run, tmp_path, monkeypatch):
    pytest.importorskip("rocrate", reason=NEEDS)
    check = crate.check

    def late(library, archive, folder, names):
        before = (run / "claims.csv").read_text()
        (run / "claims.csv").write_text("other\n")
        try:
            check(library, archive, folder, names)
        finally:
            (run / "claims.csv").write_text(before)

    monkeypatch.setattr(crate, "check", late)
    with pytest.raises(UserError, match=r"claims\.csv is not as in"):
        crate.export(run, tmp_path / "run.zip")
    assert not list(tmp_path.iterdir())


def test_a_file_that_the_crate_does_not_list_is_noticed(run, tmp_path, monkeypatch):
    pytest.importorskip("rocrate", reason=NEEDS)
    check = crate.check
    monkeypatch.setattr(crate, "check", lambda *given: check(*given[:3], given[3] | {"lost.csv"}))
    with pytest.raises(UserError, match=r"lists \['lost.csv'\] wrongly"):
        crate.export(run, tmp_path / "run.zip")


@pytest.mark.parametrize("name", crate.NEEDED)
def test_a_run_that_is_not_finished_is_named(run, tmp_path, monkeypatch, name):
    monkeypatch.setattr(crate, "library", lambda: None)
    for needed in crate.NEEDED:
        if needed != name:
            (tmp_path / needed).write_text("{}")
    with pytest.raises(UserError, match=f"{name}: missing; finish the run first"):
        crate.export(tmp_path, tmp_path / "run.zip")


def test_without_the_library_it_names_the_command(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rocrate", None)
    monkeypatch.setitem(sys.modules, "rocrate.rocrate", None)
    with pytest.raises(UserError, match="rocrate is not installed; run: make crate"):
        crate.export(run, tmp_path / "run.zip")
