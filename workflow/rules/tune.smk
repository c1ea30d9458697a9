"""The configurations of the kernels, timed anew on this GPU; only where `tuning` asks for it."""

if config["tuning"] == "tune":

    rule tune:
        input:
            study.tune_inputs,
        output:
            "<run>/tuned/{family}.json",
        log:
            "<log>/tune/{family}.log",
        # All cores: candidates are compiled side by side, then nothing may run beside a timing.
        threads: workflow.cores
        resources:
            gpu=1,
        params:
            dtypes=config["dtypes"],
            passes=config["passes"],
            limit=study.limit,
        message:
            "Tune {wildcards.family}"
        shell:
            "python -m harness.tune --file {wildcards.family} --dtypes {params.dtypes}"
            " --passes {params.passes} {params.limit} --jobs {threads} --out {output} > {log} 2>&1"
