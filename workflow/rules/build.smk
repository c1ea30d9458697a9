"""Every kernel, compiled ahead of time for each architecture as its rules and tables have it."""


rule build:
    input:
        study.build_inputs,
    output:
        table="<run>/build/{family}.json",
        ir=directory("<run>/build/{family}"),
    log:
        "<log>/build/{family}.log",
    params:
        archs=config["build"]["archs"],
        # The report says which entries of the committed tables bind no longer.
        tables=study.committed_tables,
    message:
        "Build {wildcards.family}"
    shell:
        "python -m harness.build --file {wildcards.family} --archs {params.archs}"
        " --out {output.table} --ir {output.ir} > {log} 2>&1"
