"""The jobs of a study: what the Snakefile asks."""
