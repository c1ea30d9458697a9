"""Proves, times and reports the kernels, and writes the paper: `snakemake --cores all`."""

import sys
from pathlib import Path

from snakemake.utils import min_version

from harness import discover
from harness.command import UserError

min_version("9.0")


configfile: "config/config.yaml"


# Built by `make image`; used with `--sdm apptainer` only.
container: "docker-daemon://tilewright:latest"


try:
    study = discover.Study.load(Path(workflow.basedir), config, workflow.configfiles)
except UserError as error:
    sys.exit(f"tilewright: {error}")

# The commands run with the Python that runs Snakemake, be its environment activated or not.
shell.prefix(f"{study.variables}; PATH='{Path(sys.executable).parent}':$PATH; ")


pathvars:
    run=study.run,
    log=f"{study.run}/logs",


wildcard_constraints:
    family=r"\w+",
    op=r"\w+",
    impl=r"\w+",


rule all:
    input:
        "<run>/paper.pdf",
        "<run>/report.html",


include: "workflow/rules/environment.smk"
include: "workflow/rules/survey.smk"
include: "workflow/rules/build.smk"
include: "workflow/rules/tune.smk"
include: "workflow/rules/verify.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/summarize.smk"
include: "workflow/rules/figures.smk"
include: "workflow/rules/paper.smk"


onerror:
    # The messages of the failed commands once more, where nothing drowns them.
    shell("grep -A1 --no-group-separator '^tilewright: ' {log:q} | grep -v '^=' >&2 || true")
