"""Start Snakemake by a fork of a process that has imported it: a dry run is mostly imports.

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
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The second line is imported late by Snakemake, and by the harness in its Snakefile.
PRELOAD = (
    "snakemake.cli", "snakemake.executors.touch",
    "snakemake.report.html_reporter", "snakemake.storage", "jsonschema", "numpy", "yaml", "yte",
)  # fmt: skip


@functools.cache
def _server() -> subprocess.Popen:
    call = [sys.executable, "-m", "tests.support.snakemake_server"]
    pipe = subprocess.PIPE
    server = subprocess.Popen(call, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.communicate)
    return server


def ask(words, folder, variables, out, error) -> int:
    """Run Snakemake in a folder, write what it says to two files, and return its exit code."""
    call = {"words": words, "folder": folder, "variables": variables, "files": [out, error]}
    server = _server()
    print(json.dumps(call, default=str), file=server.stdin, flush=True)
    return int(server.stdout.readline())


def main() -> None:
    """Run the server; return if the tests are done, and in each fork if its call is."""
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(words, folder, variables, files) -> None:
    from snakemake import cli
    from snakemake.executors import touch

    for number, path in enumerate((os.devnull, *files)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[0], sys.argv = "", ["-c", *words]
    # Snakemake collects little garbage, but looks for it a hundred times; and where it touches
    # files, it sleeps for a tenth of a second at each job.
    gc.disable()
    touch.Executor.SLEEPING_TIME = 0
    cli.main()


if __name__ == "__main__":
    main()
