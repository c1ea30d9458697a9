"""The paper and the report."""


rule paper:
    input:
        study.sources("paper/build.py"),
        study.glob("paper/*.tex", "paper/sections/*.tex", "paper/*.bib"),
        expand("<run>/figures/{name}.pdf", name=study.stems("paper/figures")),
        expand("<run>/tables/{name}.tex", name=study.stems("paper/tables")),
        "<run>/numbers.tex",
    output:
        "<run>/paper.pdf",
    log:
        "<log>/paper.log",
    params:
        run=subpath(output[0], parent=True),
    message:
        "Typeset {output}"
    shell:
        "python paper/build.py --run {params.run} --out {output} > {log} 2>&1"


rule report:
    input:
        study.sources("paper/report.py"),
        study.glob("paper/templates/*"),
        expand("<run>/figures/{name}.svg", name=study.stems("paper/figures")),
        rules.summarize.output,
        rules.survey.output,
    output:
        "<run>/report.html",
    log:
        "<log>/report.log",
    params:
        run=subpath(output[0], parent=True),
    message:
        "Write {output}"
    shell:
        "python paper/report.py --run {params.run} --out {output} > {log} 2>&1"
