"""Every implementation of every op against the oracle; nothing is timed without its report."""


rule verify:
    input:
        study.verify_inputs,
    output:
        "<run>/verify/{op}/{impl}.json",
    log:
        "<log>/verify/{op}/{impl}.log",
    priority: study.verify_priority
    threads: study.verify_threads
    resources:
        # No parameter: another plan repeats no verification.
        board=study.gpus.verify_board,
    params:
        seed=config["seed"],
        dtypes=config["dtypes"],
        passes=config["passes"],
        cases=study.judged,
        budget=study.verify_budget,
        choices=study.choices,
        drawing=study.drawing,
        # A change of the configurations in force shows in no input.
        tuning=study.tuning,
        # A report of another version opens no gate.
        library=study.library,
    message:
        "Verify {wildcards.op} of {wildcards.impl}"
    shell:
        "python -m harness.verify --op {wildcards.op} --impl {wildcards.impl} --seed {params.seed}"
        " --dtypes {params.dtypes} --passes {params.passes} {params.cases}"
        " {params.budget} {params.choices} {params.drawing} --board {resources.board}"
        " --jobs {threads} --out {output}"
        " > {log} 2>&1"


rule verified:
    input:
        [study.reports(op) for op in study.ops],


# Our kernels under compute-sanitizer: only where `snakemake sanitized` asks for it.
rule sanitize:
    input:
        study.sanitize_inputs,
    output:
        "<run>/sanitize/{family}.json",
    log:
        "<log>/sanitize/{family}.log",
    params:
        # A change of the configurations in force shows in no input.
        tuning=study.tuning,
    message:
        "Sanitize {wildcards.family}"
    shell:
        "python -m harness.sanitize --file {wildcards.family} --out {output} > {log} 2>&1"


rule sanitized:
    input:
        expand("<run>/sanitize/{family}.json", family=study.families),
