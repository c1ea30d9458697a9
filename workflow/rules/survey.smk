"""The Triton kernels that the installed libraries ship."""


rule survey:
    input:
        study.sources("harness/survey.py"),
    output:
        "<run>/survey.csv",
    log:
        "<log>/survey.log",
    message:
        "Survey the installed libraries"
    shell:
        "python -m harness.survey --out {output} > {log} 2>&1"
