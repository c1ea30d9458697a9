"""Start a command by a fork of a process that has imported what takes long: Snakemake, or Triton.

The server reads a line of JSON for each call, and answers with a line that holds its exit code.
Nothing of this project is imported before the fork, because each tree has a copy of its own. A call
with another PYTHONPATH needs a new process, because Python reads it at its start.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Snakemake imports the second line late, as the harness in its Snakefile does.
PRELOAD = {
    "snakemake": (
        "snakemake.cli", "snakemake.executors.touch",
        "snakemake.report.html_reporter", "snakemake.storage", "jsonschema", "numpy", "yaml", "yte",
    ),
    "harness.build": ("torch", "torch._dynamo", "triton"),
}  # fmt: skip
# Triton reads it while it is imported, and the build sets it before.
BUILD = {"TRITON_DISABLE_LINE_INFO": "1"}


@functools.cache
def _server(command: str) -> subprocess.Popen:
    call = [sys.executable, "-m", "tests.support.preloaded", command]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        call, cwd=ROOT, env=variables | BUILD, stdin=pipe, stdout=pipe, text=True
    )
    atexit.register(server.communicate)
    return server


def run(command, words, folder, variables) -> subprocess.CompletedProcess:
    """Run a command of PRELOAD in a folder with these words and variables."""
    server = _server(command)
    with tempfile.TemporaryDirectory() as place:
        said = [Path(place, name) for name in ("out", "error")]
        call = {"words": words, "folder": folder, "variables": variables, "files": said}
        print(json.dumps(call, default=str), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, code, *(path.read_text() for path in said))


def main() -> None:
    """Run the server; return if the tests are done, and in each fork if its call is."""
    command = sys.argv[1]
    for name in PRELOAD[command]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(command, **json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(command, words, folder, variables, files) -> None:
    for number, path in enumerate((os.devnull, *files)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[0], sys.argv = "", ["-c", *words]
    if command != "snakemake":
        runpy.run_module(command, run_name="__main__", alter_sys=True)
        return
    from snakemake import cli
    from snakemake.executors import touch

    # Snakemake collects little garbage, but looks for it a hundred times; and where it touches
    # files, it sleeps for a tenth of a second at each job.
    gc.disable()
    touch.Executor.SLEEPING_TIME = 0
    cli.main()


if __name__ == "__main__":
    main()
