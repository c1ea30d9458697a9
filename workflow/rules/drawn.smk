"""The seed of the shapes that this run draws, one for all its jobs: what is timed was verified."""

if study.measures:

    rule draw:
        input:
            # All that uses a GPU waits for the shapes, and so for this. New ceilings draw no others.
            ancient("<run>/ceilings.csv"),
        output:
            "<run>/drawn.json",
        log:
            "<log>/drawn.log",
        # Before all others, and alone: what tunes itself needs all cores, waits for it, and would
        # wait for each job beside it.
        priority: 4
        threads: workflow.cores
        params:
            seed=config["drawn_seed"],
        message:
            "Draw the shapes of this run"
        shell:
            "python -m harness.calls.drawn --seed {params.seed} --out {output} > {log} 2>&1"
