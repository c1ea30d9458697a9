"""Our kernels under compute-sanitizer: `python -m harness.sanitize --file softmax --out F`.

Each tool runs all edge cases of the ops of a kernel file, both passes, in a process of its own. The
tool memcheck finds accesses out of bounds, initcheck reads of memory that was never written, and
racecheck hazards in shared memory. Exit code 1: a tool found something in a kernel of ours, or did
not end.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from harness.cli import UserError, run
from harness.files import write_json
from harness.project import fingerprint, registry
from harness.project.implementations import OURS
from harness.project.source_tree import ops

TOOLS = ("memcheck", "initcheck", "racecheck")
SANITIZER = "compute-sanitizer"
# The last line of memcheck and initcheck, and that of racecheck.
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
CASES = re.compile(r"^sanitized (\d+) cases$", re.MULTILINE)
# The kernel of a finding: "at _row_kernel+0x6f0" or, with line information, "at f(...)+0x6f0".
PLACE = re.compile(r"\bat (\w+)(?:\([^)]*\))?\+0x")
MOST_FINDINGS = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="harness.sanitize", description=__doc__.split("\n")[0])
    parser.add_argument("--file", required=True, help="stem of a kernel file")
    parser.add_argument("--out", required=True, help="the report, JSON")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of each tool")
    arguments = parser.parse_args()
    if not Path(f"kernels/{arguments.file}.py").is_file():
        raise UserError(f"kernels/{arguments.file}.py: no such file")
    if shutil.which(SANITIZER) is None:
        raise UserError(f"{SANITIZER}: not found; it comes with the CUDA toolkit, put it on PATH")
    # The digest is taken before the code runs: after an edit meanwhile the report is out of date.
    code = fingerprint.implementation(Path(), arguments.file, OURS)
    with _locked():
        tools = [_tool(name, arguments) for name in TOOLS]
    names = [op for op, family in ops(Path()).items() if family == arguments.file]
    report = {"file": arguments.file, "ops": names, "code_sha256": code, "version": _version()}
    write_json(arguments.out, report | {"tools": tools})
    for tool in tools:
        print("sanitize {}: {tool}: {status} {reason}".format(arguments.file, **tool).rstrip())
    return int(any(tool["status"] != "ok" for tool in tools))


def _locked() -> contextlib.AbstractContextManager:
    from harness.machine import gpu_lock

    return gpu_lock.hold(exclusive=False)


def _tool(name: str, arguments: argparse.Namespace) -> dict:
    """The row of one tool: its status, what it found in kernels of ours, and in others."""
    command = [
        SANITIZER, "--tool", name, "--print-limit", str(MOST_FINDINGS), "--report-api-errors", "no",
        sys.executable, "-m", "harness.sanitize.worker", "--file", arguments.file,
        "--dtypes", *arguments.dtypes,
    ]  # fmt: skip
    # Each tensor is an allocation of its own, so that its end is known to the tool.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=arguments.timeout_s
        )
        text = done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        text = None
    row = {"tool": name, "seconds": round(time.monotonic() - began, 1)}
    return row | judge(text, _kernels(arguments.file))


def _kernels(stem: str) -> set[str]:
    """The names of all compiled functions that a kernel file declares or takes from another."""
    values = vars(registry.kernel(stem)).values()
    return {value.fn.__name__ for value in values if hasattr(value, "arg_names")}


def judge(text: str | None, ours: set[str]) -> dict:
    """Return the findings in the output of a tool, None if the tool did not end.

    ours: the names of our kernels. A finding that names none of them is counted apart, such as one
    in a library's kernel that made the inputs. A finding that names no kernel at all counts as
    ours.
    """
    if text is None:
        return {"status": "hung", "reason": "did not end in time", "cases": 0, "findings": {}}
    summary, cases = SUMMARY.search(text), CASES.search(text)
    places = Counter(PLACE.findall(text))
    found = {name: count for name, count in sorted(places.items()) if name in ours}
    others = {name: count for name, count in sorted(places.items()) if name not in ours}
    row = {"cases": int(cases[1]) if cases else 0, "findings": found, "elsewhere": others}
    if summary is None or cases is None:
        words = [line for line in text.splitlines() if line.strip()]
        last = words[-1].strip() if words else "no output"
        return {"status": "crashed", "reason": f"ended before all cases had run: {last}"} | row
    total = int(summary[1])
    if found or (total and not others):
        where = ", ".join(found) or "no kernel named"
        return {"status": "findings", "reason": f"{total} findings: {where}"} | row
    return {"status": "ok", "reason": ""} | row


def _version() -> str:
    text = subprocess.run([SANITIZER, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"Version (\S+)", text)
    return found[1] if found else ""


if __name__ == "__main__":
    run(main)
