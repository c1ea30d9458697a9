"""Check that a raw measurement is read as it was written, or refused."""

import math
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.cli import UserError
from harness.results import columns, raw
from tests.support.raw_files import PLAIN, save, text_of

REMEDY = "measure it again"
NAME = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12)
COUNT = st.integers(0, 2**62)
READING = st.floats(0, 1e12)
TIME = st.floats(0, 1e12, exclude_min=True)


@st.composite
def any_row(draw) -> dict[str, object]:
    texts = [column for column in columns.RAW.columns if column.kind == columns.TEXT]
    row: dict[str, object] = {
        column.name: draw(st.sampled_from(column.values) if column.values else NAME)
        for column in texts
    }
    row |= {name: draw(COUNT) for name in raw.COUNTS}
    row |= {name: draw(TIME) for name in raw.TIMES}
    row |= {name: draw(st.none() | READING) for name in raw.READINGS}
    row["throttle"] = draw(st.sampled_from(["", "power cap; power brake"]))
    row["reason"] = draw(st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=40))
    if row["status"] not in raw.TIMED:
        row |= {name: None for name in (*raw.TIMES, "calls", "peak_mem_bytes")}
    return row


CEILING = {"quantity": "read", "unit": "GB/s", "value": 1.0, "source": "measured"}


def with_gpu(gpu):
    environment = {"gpu": gpu}
    return {"environment": environment, "environment_sha256": raw.environment_sha256(environment)}


@given(st.lists(any_row(), max_size=4))
def test_a_written_file_is_read_back_equal(rows):
    full = [{name: row.get(name) for name in raw.HEADER} for row in rows]
    read = raw.parse(text_of(rows), "raw.csv", REMEDY)
    for got, wanted in zip(read, full, strict=True):
        plain = "".join(letter if letter.isprintable() else " " for letter in wanted["reason"])
        assert got == wanted | {"reason": plain}


@given(st.text(max_size=80))
def test_any_reason_stays_on_its_line(reason):
    assert len(text_of([PLAIN | {"reason": reason}]).splitlines()) == 2
    text_of([PLAIN | {"reason": reason}]).encode()
    raw.parse(text_of([PLAIN | {"reason": reason}]), "raw.csv", REMEDY)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(any_row(), min_size=1, max_size=4), data=st.data())
def test_a_truncated_file_is_refused(tmp_path, rows, data):
    # The sidecar names no board, so none of another one is in the rows.
    path = save(tmp_path / "softmax.csv", [row | {"board": ""} for row in rows])
    content = path.read_bytes()
    assert raw.read(path, REMEDY)[0]
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(UserError, match=r"softmax\.csv.*measure it again"):
        raw.read(path, REMEDY)


def test_every_truncation_inside_a_line_is_seen_without_the_sidecar():
    text = text_of([PLAIN, PLAIN | {"block": 1}])
    for length in range(len(text)):
        if not text[:length].endswith("\n"):
            with pytest.raises(UserError, match="truncated"):
                raw.parse(text[:length], "raw.csv", REMEDY)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_byte_is_refused(tmp_path, data):
    path = save(tmp_path / "softmax.csv", [PLAIN])
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(UserError):
        raw.read(path, REMEDY)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"status": "fine"}, "status 'fine' is none of"),
        ({"pass": "sideways"}, "none of forward, backward, both"),
        ({"device_us": -1.0}, "device_us is -1.0, no measurement"),
        ({"device_us": 0.0}, "device_us is 0.0, no measurement"),
        ({"call_us": 0.0}, "call_us is 0.0, no measurement"),
        ({"device_us": "fast"}, "device_us is 'fast', no number"),
        ({"device_us": None}, "device_us is empty"),
        ({"calls": "1.5"}, "calls is '1.5', no number"),
        ({"power_w": "nan"}, "power_w is nan"),
        ({"impl": ""}, "impl is empty"),
        ({"block": 10**400}, "block is 10+, no measurement"),
        ({"block": None}, "block is empty"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(change, problem):
    with pytest.raises(UserError, match=r"raw\.csv:3: .*measure it again") as error:
        raw.parse(text_of([PLAIN, PLAIN | change]), "raw.csv", REMEDY)
    assert re.search(problem, str(error.value))


def test_a_row_without_times_needs_none():
    row = PLAIN | {"status": "oom", "device_us": None, "call_us": None, "calls": None}
    assert raw.parse(text_of([row]), "raw.csv", REMEDY)[0]["device_us"] is None


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "\n", '"open\n', raw.header_line() + "1,2\n"])
def test_a_table_of_another_kind_is_refused(text):
    with pytest.raises(UserError, match=r"raw\.csv:\d+: .*measure it again"):
        raw.parse(text, "raw.csv", REMEDY)


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "softmax.csv"
    path.write_bytes(b"\x89PNG\r\n\xff\xfe\n")
    with pytest.raises(UserError, match="not UTF-8"):
        raw.read(path, REMEDY)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"softmax\.csv: missing; measure it again"):
        raw.read(tmp_path / "softmax.csv", REMEDY)


def test_a_missing_sidecar_is_named(tmp_path):
    path = save(tmp_path / "softmax.csv", [PLAIN])
    path.with_suffix(".json").unlink()
    with pytest.raises(UserError, match=r"softmax\.json: missing"):
        raw.read(path, REMEDY)


def test_a_sidecar_of_other_rows_is_refused(tmp_path):
    path = save(tmp_path / "softmax.csv", [PLAIN], rows=2)
    with pytest.raises(UserError, match=r"1 rows where softmax\.json says 2"):
        raw.read(path, REMEDY)


def test_a_sidecar_without_a_key_is_refused(tmp_path):
    path = save(tmp_path / "softmax.csv", [PLAIN])
    path.with_suffix(".json").write_text("{}")
    with pytest.raises(UserError, match=r"softmax\.json: has no 'op'"):
        raw.read(path, REMEDY)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"run_id": None}, r"softmax\.json: 'run_id' cannot be None"),
        ({"environment": []}, "'environment' cannot be"),
        ({"ceilings": None}, "'ceilings' cannot be None"),
        ({"ceilings": ["read"]}, r"'ceilings\[0\]' cannot be 'read', expected an object"),
        ({"ceilings": [{}]}, r"ceilings\[0\]: has no 'quantity'"),
        ({"ceilings": [CEILING | {"value": 0}]}, r"'ceilings\[0\].value' cannot be 0, .* above 0"),
        ({"ceilings": [CEILING | {"value": math.nan}]}, "not readable as JSON .NaN is no number"),
        ({"date": None}, "'date' cannot be None"),
        ({"commit": 3}, "'commit' cannot be 3"),
        ({"dirty": "no"}, "'dirty' cannot be 'no'"),
        ({"mode": "dreamt"}, "'mode' cannot be 'dreamt'"),
        ({"overhead": "x"}, "'overhead' cannot be 'x'"),
        ({"overhead": {"total_s": "x"}}, "'overhead.total_s' cannot be 'x', expected a number"),
        (with_gpu("H200"), "'environment.gpu' cannot be 'H200'"),
    ],
)
def test_a_sidecar_of_other_kinds_is_refused(tmp_path, changes, problem):
    path = save(tmp_path / "softmax.csv", [PLAIN], **changes)
    with pytest.raises(UserError, match=rf"{problem}.*measure it again"):
        raw.read(path, REMEDY)


def test_another_environment_than_the_named_one_is_refused(tmp_path):
    other = {"gpu": {"name": "another"}}
    path = save(tmp_path / "softmax.csv", [PLAIN], environment=other)
    with pytest.raises(UserError, match=r"softmax\.json: its environment_sha256 is of another"):
        raw.read(path, REMEDY)
    named = raw.environment_sha256(other)
    path = save(tmp_path / "softmax.csv", [PLAIN], environment=other, environment_sha256=named)
    assert raw.read(path, REMEDY)[1]["environment"] == other


@pytest.mark.parametrize("change", [{"device_us": math.inf}, {"power_w": math.nan}, {"speed": 1}])
def test_a_file_that_no_reader_would_take_is_not_written(change):
    with pytest.raises(ValueError):
        raw.line(PLAIN | change)
