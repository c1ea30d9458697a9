"""The frontier: raw times, measured on this machine's GPU or replayed from a recorded run."""

if study.measures:

    rule measure:
        input:
            study.sources("harness/measure/__main__.py"),
            reports=study.gate,
            tables=study.tables,
            autotuned=study.autotuned,
            # A measurement on another board adds its rows, and makes no other one run again.
            ceilings=ancient("<run>/ceilings.csv"),
            drawn=study.draws,
        output:
            # Times stay until new ones take their place, also where measuring these fails.
            csv=update("<run>/raw/{op}.csv"),
            sidecar=update("<run>/raw/{op}.json"),
        log:
            "<log>/measure/{op}.log",
        # With one GPU all cores: nothing may run beside it. With several it begins after all else.
        priority: -1
        threads: study.gpus.threads(workflow.cores)
        resources:
            **study.gpus.one_gpu("op"),
        params:
            verify=f"{study.run}/verify",
            autotune=f"{study.run}/autotune",
            # No input: a rule that waits for it hides an edit of the harness under a new commit.
            environment=f"{study.run}/environment.json",
            seed=config["seed"],
            dtypes=config["dtypes"],
            passes=config["passes"],
            impls=study.impls_of,
            timing=study.timing,
            shapes=study.shapes,
            # A change of the configurations in force shows in no input.
            tuning=study.tuning,
            failure=study.failure,
            # After a failure the former times lie there, and are measured again.
            failed=study.failed,
        message:
            "Measure {wildcards.op}"
        shell:
            "python -m harness.measure --op {wildcards.op} --verify {params.verify}"
            " --autotuned {params.autotune} --environment {params.environment}"
            " --ceilings {input.ceilings} --seed {params.seed}"
            " --dtypes {params.dtypes} --passes {params.passes} --impls {params.impls}"
            " {params.timing} {params.shapes} --drawn {input.drawn} --board {resources.board}"
            # The record tells only which cells it lacks. These come first; no number moves with it.
            " --recorded {config[recorded]:q} --out {output.csv}"
            # Whether it may be narrower was asked while the configuration was read.
            " --narrower > {log} 2>&1"
            " || {{ date +%s%N > {params.failure}; exit 1; }}"

else:

    rule replay:
        input:
            study.sources("harness/results/replay.py"),
            study.recorded_inputs,
        output:
            csv="<run>/raw/{op}.csv",
            sidecar="<run>/raw/{op}.json",
        log:
            "<log>/replay/{op}.log",
        params:
            recorded=config["recorded"],
        message:
            "Replay {wildcards.op} from {params.recorded}"
        shell:
            "python -m harness.results.replay --op {wildcards.op} --recorded {params.recorded:q}"
            " --out {output.csv} > {log} 2>&1"


rule measured:
    input:
        expand("<run>/raw/{op}.csv", op=study.shown),


include: "dissect.smk"
