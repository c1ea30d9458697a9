"""Rules: one file for each kind of module that `accelerate` knows."""
