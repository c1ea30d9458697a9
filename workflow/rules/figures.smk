"""Figures, tables and numbers from CSV files; a script's presence is its registration."""


rule figure:
    input:
        study.script_inputs("figures"),
        "paper/tilewright.mplstyle",
        rules.summarize.output,
        rules.survey.output,
    output:
        pdf="<run>/figures/{name}.pdf",
        svg="<run>/figures/{name}.svg",
    log:
        "<log>/figures/{name}.log",
    params:
        run=subpath(output[0], ancestor=2),
        # Which families have a figure of their own decides what some scripts show.
        drawn=study.drawn,
    message:
        "Draw figure {wildcards.name}"
    shell:
        "python paper/figures/{wildcards.name}.py --run {params.run} --out {output.pdf}"
        " > {log} 2>&1"


rule table:
    input:
        study.script_inputs("tables"),
        # The targets that the tables compare with.
        study.glob("paper/*.csv"),
        rules.summarize.output,
        rules.survey.output,
    output:
        "<run>/tables/{name}.tex",
    log:
        "<log>/tables/{name}.log",
    params:
        run=subpath(output[0], ancestor=2),
        # Which families have a figure of their own decides what some scripts show.
        drawn=study.drawn,
    message:
        "Set table {wildcards.name}"
    shell:
        "python paper/tables/{wildcards.name}.py --run {params.run} --out {output} > {log} 2>&1"


rule numbers:
    input:
        study.sources("paper/claims.py"),
        "paper/claims.yaml",
        rules.summarize.output,
        rules.survey.output,
    output:
        "<run>/numbers.tex",
    log:
        "<log>/numbers.log",
    params:
        run=subpath(output[0], parent=True),
    message:
        "Derive the numbers of the text"
    shell:
        "python paper/claims.py --run {params.run} --out {output} > {log} 2>&1"
