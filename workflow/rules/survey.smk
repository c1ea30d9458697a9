"""The kernels that the libraries ship: those installed, and the others as an earlier survey has them."""


rule survey:
    input:
        study.sources("harness/survey.py"),
        study.glob("kernels/**/*.py", "baselines/*.py"),
        snapshot=study.glob("results/recorded/survey.csv"),
        published=study.glob("results/recorded/published.csv"),
    output:
        "<run>/survey.csv",
    log:
        "<log>/survey.log",
    message:
        "Survey the libraries"
    shell:
        "python -m harness.survey --snapshot {input.snapshot} --published {input.published}"
        " --out {output} > {log} 2>&1"
