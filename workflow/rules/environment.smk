"""The machine: what it is, and how fast its memory and its tensor cores are."""


rule environment:
    input:
        study.sources("harness/machine/environment.py"),
    output:
        # A description that still holds is kept.
        update("<run>/environment.json"),
    log:
        "<log>/environment.log",
    params:
        config_sha256=study.config_sha256,
        # A new commit is a new environment, though no input changed.
        tree=study.tree,
    message:
        "Describe this machine"
    shell:
        "python -m harness.machine.environment --out {output} --config-sha256 {params.config_sha256}"
        " > {log} 2>&1"


rule ceilings:
    input:
        study.sources("harness/machine/ceilings.py"),
        "harness/machine/datasheets.csv",
    output:
        "<run>/ceilings.csv",
    log:
        "<log>/ceilings.log",
    # Alone, and before all that takes long: the first measurement would wait for both to end.
    priority: 5
    threads: workflow.cores
    resources:
        gpu=1,
    message:
        "Measure the ceilings of this machine"
    shell:
        "python -m harness.machine.ceilings --out {output} > {log} 2>&1"
