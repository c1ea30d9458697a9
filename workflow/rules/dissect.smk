"""A training step of a network taken apart on this machine's GPU, a file for each question."""

if study.dissections:

    rule dissect:
        input:
            study.dissect_inputs,
        output:
            "<run>/dissect/{subject}.csv",
        log:
            "<log>/dissect/{subject}.log",
        # With one GPU all cores: nothing may run beside a timing.
        threads: study.gpus.threads(workflow.cores)
        resources:
            **study.gpus.one_gpu("subject"),
        params:
            options=study.dissect_options,
            # A change of the configurations in force shows in no input.
            tuning=study.tuning,
        message:
            "Dissect {wildcards.subject}"
        shell:
            "python -m harness.measure.dissect {wildcards.subject} {params.options}"
            " --board {resources.board} --out {output} > {log} 2>&1"
