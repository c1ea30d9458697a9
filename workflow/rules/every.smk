"""Variables, words of the log, and the GPUs to share out, for the jobs of every rule."""

shell.prefix(study.variables)
logger.addFilter(progress.Words(Path(study.run)))

for name, amount in study.gpus.at_once.items():
    # An amount that is given by hand or by a profile stays.
    if name not in workflow.global_resources:
        workflow.register_resource(name, amount)
