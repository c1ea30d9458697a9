"""From rows to what the paper reads: medians, intervals, verdicts, resources."""


rule summarize:
    input:
        study.sources("harness/summarize/__main__.py"),
        study.recorded_reports,
        study.sanitized,
        study.dissected,
        expand("<run>/build/{family}.json", family=study.families),
        [study.reports(op) for op in study.ops],
        expand("<run>/raw/{op}.{kind}", op=study.shown, kind=["csv", "json"]),
        "<run>/environment.json",
        "<run>/ceilings.csv",
        "harness/machine/datasheets.csv",
        study.tables_in_force,
    output:
        # The first: its folder is that of the run.
        "<run>/columns.json",
        expand("<run>/{name}.csv", name=study.summaries),
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
