"""The problems: for each op a reference, its inputs, cases, cost and properties.

Neutral between our kernels and the baselines: this package imports the standard library and torch,
and neither of the two imports it.
"""
