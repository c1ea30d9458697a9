"""From rows to what the paper reads: medians, intervals, verdicts, resources."""


rule summarize:
    input:
        study.sources("harness/summarize/__main__.py"),
        study.recorded_reports,
        study.sanitized,
        expand("<run>/build/{family}.json", family=study.families),
        [study.reports(op) for op in study.ops],
        expand("<run>/raw/{op}.{kind}", op=study.shown, kind=["csv", "json"]),
        "<run>/environment.json",
        "<run>/ceilings.csv",
        "harness/machine/datasheets.csv",
        "harness/summarize/kernl.csv",
        study.tables_in_force,
    output:
        "<run>/summary.csv",
        "<run>/verdicts.csv",
        "<run>/claims.csv",
        "<run>/verification.csv",
        "<run>/capabilities.csv",
        "<run>/gaps.csv",
        "<run>/ledger.csv",
        "<run>/kernl.csv",
        "<run>/sanitizer.csv",
        "<run>/resources.csv",
        "<run>/ir.csv",
        "<run>/runs.csv",
        "<run>/environment.csv",
        "<run>/shown_ceilings.csv",
        "<run>/overhead.csv",
        "<run>/datasheets.csv",
        "<run>/tuning.csv",
    log:
        "<log>/summarize.log",
    params:
        run=subpath(output[0], parent=True),
        recorded=config["recorded"],
        ops=study.shown,
        untimed=study.untimed,
    message:
        "Summarize"
    shell:
        "python -m harness.summarize --run {params.run} --recorded {params.recorded:q}"
        " --ops {params.ops} --untimed {params.untimed} > {log} 2>&1 && cat {log}"
