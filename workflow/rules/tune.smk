"""Choices by timing on this GPU: of our configurations, where `tuning` asks for it, and of the
libraries that tune themselves, before they are verified and measured."""

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


if study.measures:

    rule autotune:
        input:
            study.autotune_inputs,
        output:
            "<run>/autotune/{op}/{impl}.json",
        log:
            "<log>/autotune/{op}/{impl}.log",
        # Before all verifications, of which each takes one core: one that waits for its turn among
        # them would leave the other cores idle until the longest has ended.
        priority: 2
        threads: study.gpus.autotune_threads(workflow.cores)
        resources:
            **study.gpus.trial,
        params:
            dtypes=config["dtypes"],
            passes=config["passes"],
            limit=study.limit,
            drawing=study.drawing,
            # A report of another version does not serve.
            library=study.library,
            # Choices hold for the board on which they were made.
            board=study.gpus.board,
            timeout=config["timing"]["cell_timeout_s"],
        message:
            "Autotune {wildcards.op} of {wildcards.impl}"
        shell:
            "python -m harness.measure.autotune --op {wildcards.op} --impl {wildcards.impl}"
            " --dtypes {params.dtypes} --passes {params.passes}"
            " {params.limit} {params.drawing} --cell-timeout-s {params.timeout}"
            " --jobs {resources.compilers} --board {resources.board}"
            " --compile-board {resources.compile_board} --out {output} > {log} 2>&1"
