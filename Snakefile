"""Proves, times and reports the kernels, and writes the paper: `snakemake --cores all`."""

import sys
from pathlib import Path

from snakemake.logging import logger
from snakemake.utils import min_version

from harness.cli import UserError
from harness.study import jobs, progress, surroundings

min_version("9.0")


configfile: "config/config.yaml"


# Built by `make image`; used with `--sdm apptainer` only.
container: "docker-daemon://tilewright:latest"


try:
    spread = "gpu" not in workflow.global_resources
    study = jobs.Study.load(Path(workflow.basedir), config, workflow.configfiles, spread)
    surroundings.check(Path.cwd(), study.run)
except UserError as error:
    sys.exit(f"tilewright: {error}")


pathvars:
    run=study.run,
    log=f"{study.run}/logs",


wildcard_constraints:
    family=r"\w+",
    op=r"\w+",
    impl=r"\w+",
    subject=r"\w+",


rule all:
    input:
        "<run>/paper.pdf",
        "<run>/report.html",


include: "workflow/rules/every.smk"
include: "workflow/rules/environment.smk"
include: "workflow/rules/survey.smk"
include: "workflow/rules/build.smk"
include: "workflow/rules/tune.smk"
include: "workflow/rules/autotune.smk"
include: "workflow/rules/drawn.smk"
include: "workflow/rules/verify.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/summarize.smk"
include: "workflow/rules/figures.smk"
include: "workflow/rules/paper.smk"
include: "workflow/rules/messages.smk"
