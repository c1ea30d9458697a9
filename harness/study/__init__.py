"""The jobs of a study: what the Snakefile asks, and a study that ends in time."""
