"""Our kernels under compute-sanitizer."""
