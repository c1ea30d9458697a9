"""Choices by timing on this GPU of the libraries that tune themselves, before they are verified and
measured: all is compiled first, and then each library chooses alone."""

if study.measures:

    rule compile:
        input:
            study.compile_inputs,
        output:
            "<run>/autotune/{op}/{impl}.compiled.json",
        log:
            "<log>/compile/{op}/{impl}.log",
        # Before all verifications, of which some take many cores for minutes. The one that compiles
        # the longest decides when the measurements begin.
        priority: 3
        threads: study.gpus.autotune_threads(workflow.cores)
        resources:
            **study.gpus.compiling,
        params:
            dtypes=config["dtypes"],
            passes=config["passes"],
            shapes=study.shapes,
            drawing=study.drawing,
            # Programs of another version do not serve.
            library=study.library,
            timeout=config["timing"]["cell_timeout_s"],
            # The report of the library, beside which its folder and this phase's report lie.
            report=f"{study.run}/autotune/{{op}}/{{impl}}.json",
        message:
            "Compile {wildcards.op} of {wildcards.impl}"
        shell:
            "python -m harness.measure.autotune --phase compile --op {wildcards.op}"
            " --impl {wildcards.impl} --dtypes {params.dtypes} --passes {params.passes}"
            " {params.shapes} {params.drawing} --cell-timeout-s {params.timeout}"
            " --jobs {resources.compilers} --compile-board {resources.board}"
            " --out {params.report} > {log} 2>&1"

    rule autotune:
        input:
            study.autotune_inputs,
        output:
            "<run>/autotune/{op}/{impl}.json",
        log:
            "<log>/autotune/{op}/{impl}.log",
        # After all that compiles on its GPU, and before all verifications: these give way.
        priority: 2
        threads: study.gpus.autotune_threads(workflow.cores)
        resources:
            **study.gpus.choosing,
        params:
            dtypes=config["dtypes"],
            passes=config["passes"],
            shapes=study.shapes,
            drawing=study.drawing,
            # A report of another version does not serve.
            library=study.library,
            # Choices hold for the board on which they were made.
            board=study.gpus.board,
            timeout=config["timing"]["cell_timeout_s"],
        message:
            "Autotune {wildcards.op} of {wildcards.impl}"
        shell:
            "python -m harness.measure.autotune --phase tune --op {wildcards.op}"
            " --impl {wildcards.impl} --dtypes {params.dtypes} --passes {params.passes}"
            " {params.shapes} {params.drawing} --cell-timeout-s {params.timeout}"
            " --board {resources.board} --out {output} > {log} 2>&1"
