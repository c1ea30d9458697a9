"""Choices by timing on this GPU of our configurations, where `tuning` asks for it."""

if config["tuning"] == "tune":

    rule tune:
        input:
            study.tune_inputs,
        output:
            "<run>/tuned/{family}.json",
        log:
            "<log>/tune/{family}.log",
        # With one GPU all cores: candidates are compiled side by side, then nothing may run beside
        # a timing.
        threads: study.gpus.threads(workflow.cores)
        resources:
            **study.gpus.one_gpu("family"),
        params:
            dtypes=config["dtypes"],
            passes=config["passes"],
            limit=study.limit,
        message:
            "Tune {wildcards.family}"
        shell:
            "python -m harness.tune --file {wildcards.family} --dtypes {params.dtypes}"
            " --passes {params.passes} {params.limit} --jobs {threads} --board {resources.board}"
            " --out {output} > {log} 2>&1"
