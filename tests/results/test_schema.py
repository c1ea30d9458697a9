"""Check that files of each format are read, and that a broken one is named with the place in it."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import status
from harness.cli import UserError
from harness.results import columns, schema
from tests.support import synthetic

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "results/recorded/hopper"
PLACES = {
    "sidecar": "raw/*.json",
    "verification": "verify/*/*.json",
    "sanitizer": "sanitize/*.json",
    "manifest": "manifest.json",
}
NAMES = sorted(path.stem for path in schema.FOLDER.glob("*.json"))
REMEDY = "make it again"


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_one_and_says_what_each_key_is(name):
    described = schema.described(name)
    jsonschema.Draft202012Validator.check_schema(described)
    silent = [
        key
        for properties in _found(described, "properties")
        for key, value in properties.items()
        if not value.get("description")
    ]
    assert not silent and described["title"]


def _found(node, key):
    """Yield the values of a key at any depth."""
    for name, value in node.items() if isinstance(node, dict) else enumerate(node):
        if name == key and isinstance(value, dict):
            yield value
        if isinstance(value, dict | list):
            yield from _found(value, key)


@pytest.mark.parametrize("name", PLACES)
def test_every_recorded_file_is_of_its_format(name):
    paths = sorted(RECORDED.glob(PLACES[name]))
    assert paths
    for path in paths:
        schema.read(path, name, REMEDY)


def test_the_committed_tables_are_of_their_format():
    paths = sorted((ROOT / "kernels/tuned").glob("*.json"))
    assert paths
    for path in paths:
        schema.read(path, "tuned", REMEDY)


def test_the_statuses_of_a_cell_are_those_of_the_project():
    cell = schema.described("verification")["properties"]["cells"]["items"]["properties"]
    words = set(cell["status"]["enum"])
    assert words == set(status.STATUSES) - {"throttled", "impossible"}
    assert tuple(cell["pass"]["enum"]) == columns.PASSES


GPU = {"name": "G", "uuid": "u"}
TENSOR = {"name": "out", "max_err": 0.1, "ratio": 0.5}
CELL = {"case": "N1", "dtype": "float32", "pass": "forward", "kind": "edge", "status": "ok"}
ENTRY = {"key": {"n": 1}, "config": {"BLOCK": 2}, "us": 1.5, "rule": "BLOCK=2", "runner_up": None}
KERNEL = {"kernel": "k", "arch": "90", "config": "B=1", "default": True, "dtype": "float32"}
KERNEL |= {"status": "ok", "registers": 3, "shared_bytes": 0, "instructions": {"wgmma": 0}}
# A whole file of each format, as small as it can be.
WHOLE = {
    "environment": synthetic.environment(),
    "sidecar": {
        "op": "add", "run_id": "r", "date": "d", "commit": "c", "dirty": False, "rows": 1,
        "mode": "measured", "csv_sha256": "0" * 64, "environment": synthetic.environment(),
        "environment_sha256": "0" * 64,
        "ceilings": [{"quantity": "read", "unit": "GB/s", "value": 1.0, "source": "measured"}],
        "overhead": {"total_s": 1.0, "timed_s": 0.5, "first_s": 0, "share": 0.5},
    },
    "verification": {
        "op": "add", "impl": "ours", "impl_version": "1", "code_sha256": "c", "mode": "gpu",
        "status": "ok", "reason": "", "cells": [CELL | {"reason": "", "tensors": [TENSOR]}],
    },
    "autotune": {
        "op": "add", "impl": "x", "code_sha256": "c", "date": "d", "gpu": GPU,
        "cells": [{"cell": "N1 float32 forward", "status": "ok", "reason": "", "s": 1.0}],
    },
    "compiled": {
        "op": "add", "impl": "x", "code_sha256": "c", "date": "d", "gpu": GPU,
        "hung": [{"cell": "N1 float32 forward", "limit_s": 720.0}],
    },
    "build": {"file": "vector", "triton": "3.6.0", "kernels": [KERNEL], "ir": []},
    "tuned": {
        "device": "G",
        "families": {"vector": {"run_id": "r", "triton": "3.6.0", "kernels": {
            "k": {"source_sha256": "s", "keys": [ENTRY | {"timed": {"BLOCK=2": 1.5}}]}}}},
    },
    "sanitizer": {"version": "1", "tools": [{"tool": "memcheck", "status": "ok"}]},
    "manifest": {"files": {"raw/add.csv": "0" * 64}},
}  # fmt: skip


def refused(tmp_path, name, value):
    """Return the message about a file that holds the value, or None if it is read."""
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(value))
    try:
        assert schema.read(path, name, REMEDY) == value
    except UserError as error:
        message = str(error)
        assert message.startswith(f"{path}: ") and message.endswith(f"; {REMEDY}")
        assert len(message.splitlines()) == 1 and len(message) < 400
        return message
    return None


def ways(value, way=()):
    """Yield the way to each value in a file."""
    pairs = value.items() if isinstance(value, dict) else ()
    for key, each in enumerate(value) if isinstance(value, list) else pairs:
        yield (*way, key)
        yield from ways(each, (*way, key))


def spoilt(value, way, put):
    """Return a copy with another value at the end of a way; `put` None takes the key out."""
    whole = copy.deepcopy(value)
    node = whole
    for key in way[:-1]:
        node = node[key]
    if put is None:
        del node[way[-1]]
    else:
        node[way[-1]] = put[0]
    return whole


def test_there_is_a_whole_file_of_each_format():
    assert {*WHOLE, "ceilings"} == set(NAMES)


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_file_is_read_with_keys_that_are_new(tmp_path, name):
    assert refused(tmp_path, name, WHOLE[name]) is None
    assert refused(tmp_path, name, WHOLE[name] | {"of tomorrow": [1]}) is None


REQUIRED = [(name, key) for name in WHOLE for key in schema.described(name)["required"]]


@pytest.mark.parametrize(("name", "key"), REQUIRED)
def test_a_missing_key_is_named(tmp_path, name, key):
    assert f"json: has no '{key}'; " in refused(tmp_path, name, spoilt(WHOLE[name], (key,), None))


@pytest.mark.parametrize(
    ("name", "way", "put", "message"),
    [
        ("verification", ("cells", 0, "pass"), None, "cells[0]: has no 'pass'"),
        ("verification", ("cells", 0, "status"), ["fine"],
         "'cells[0].status' cannot be 'fine', expected one of ok, inaccurate, "),
        ("verification", ("cells", 0, "tensors", 0, "ratio"), ["x"],
         "'cells[0].tensors[0].ratio' cannot be 'x', expected a number or null"),
        ("verification", ("mode",), ["dreamt"], "expected one of interpreter, cpu, gpu"),
        ("sidecar", ("rows",), [1.0], "'rows' cannot be 1.0, expected an integer from 0"),
        ("sidecar", ("rows",), [True], "'rows' cannot be True, expected an integer"),
        ("sidecar", ("rows",), [-1], "'rows' cannot be -1, expected an integer from 0"),
        ("sidecar", ("ceilings", 0, "value"), [0], "cannot be 0, expected a number above 0"),
        ("sidecar", ("csv_sha256",), ["abc"], "'csv_sha256' cannot be 'abc', expected text that"),
        ("sidecar", ("environment", "gpu", "name"), [3], "'environment.gpu.name' cannot be 3"),
        ("environment", ("gpu",), ["H200"], "'gpu' cannot be 'H200', expected an object or null"),
        ("autotune", ("gpu", "uuid"), None, "gpu: has no 'uuid'"),
        ("compiled", ("hung",), None, "has no 'hung'"),
        ("build", ("kernels", 0, "instructions"), [[]], "'kernels[0].instructions' cannot be []"),
        ("tuned", ("families", "vector", "kernels", "k", "keys", 0, "us"), ["1"],
         "'families.vector.kernels.k.keys[0].us' cannot be '1', expected a number from 0"),
        ("sanitizer", ("tools",), [{}], "'tools' cannot be {}, expected a list"),
        ("manifest", ("files",), [{"a": 1}], "'files.a' cannot be 1, expected text that matches"),
    ],
)  # fmt: skip
def test_a_misfit_is_named_with_its_place_and_the_expectation(tmp_path, name, way, put, message):
    assert message in refused(tmp_path, name, spoilt(WHOLE[name], way, put))


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_none_is_no_json(tmp_path, name, constant):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(WHOLE[name])[:-1] + f', "more": {constant}}}')
    with pytest.raises(UserError, match=rf"not readable as JSON \({constant} is no number\)"):
        schema.read(path, name, REMEDY)


def test_a_number_beyond_all_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(WHOLE["sidecar"]).replace('"value": 1.0', '"value": 1e999'))
    with pytest.raises(UserError, match=r"'ceilings.0..value' cannot be inf, expected a number"):
        schema.read(path, "sidecar", REMEDY)


KINDS = {
    str: st.integers() | st.none() | st.booleans() | st.lists(st.integers(), max_size=2),
    bool: st.integers() | st.text(max_size=3),
    int: st.text(max_size=3) | st.booleans(),
    float: st.text(max_size=3) | st.booleans() | st.lists(st.integers(), max_size=2),
    dict: st.text(max_size=3) | st.integers() | st.lists(st.integers(), max_size=2),
    list: st.text(max_size=3) | st.integers() | st.booleans(),
}
# Keys in which null stands for a value that was not seen, or that no schema bounds.
OPEN = re.compile(r"impl_version|reason|image|sm|driver|vbios|cuda|versions\.|hashes\.|key\.")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_value_of_another_kind_is_refused_wherever_it_stands(tmp_path, data):
    name = data.draw(st.sampled_from(sorted(WHOLE)))
    bounded = [
        way for way in ways(WHOLE[name]) if not OPEN.search(".".join(map(str, way)))
        and _at(WHOLE[name], way) is not None
    ]  # fmt: skip
    way = data.draw(st.sampled_from(bounded))
    kind = type(_at(WHOLE[name], way))
    put = data.draw(KINDS[kind])
    message = refused(tmp_path, name, spoilt(WHOLE[name], way, [put]))
    assert message, (name, way, put)


def _at(value, way):
    for key in way:
        value = value[key]
    return value


def test_a_validator_is_made_once():
    assert schema._validator("sidecar") is schema._validator("sidecar")
