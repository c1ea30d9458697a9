"""Hand-written Triton kernels for the parts of a transformer, one family a file."""
