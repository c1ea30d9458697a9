"""Write the raw measurement of one op."""

import json

from harness.results import raw

PLAIN = {
    "op": "softmax",
    "family": "softmax",
    "case": "M4096-N256",
    "dtype": "float16",
    "pass": "forward",
    "impl": "ours",
    "impl_version": "3.6.0",
    "block": 0,
    "order": 0,
    "device_us": 12.5,
    "call_us": 20.25,
    "calls": 200,
    "bytes_read": 10,
    "bytes_written": 10,
    "flops": 5,
    "peak_mem_bytes": 20,
    "throttle": "",
    "status": "ok",
    "reason": "",
}


def text_of(rows) -> str:
    return raw.header_line() + "".join(map(raw.line, rows))


def save(path, rows, /, **changes):
    """Write a CSV file and the sidecar that belongs to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(rows), encoding="utf-8")
    sidecar = {
        "op": "softmax",
        "run_id": "r",
        "mode": "measured",
        "date": "2000-01-01T00:00:00Z",
        "commit": "0" * 40,
        "dirty": False,
        "rows": len(rows),
        "csv_sha256": raw.sha256(path.read_bytes()),
        "environment": {},
        "environment_sha256": raw.environment_sha256({}),
        "ceilings": [],
    }
    path.with_suffix(".json").write_text(json.dumps(sidecar | changes))
    return path
