"""Ahead-of-time build of kernel files."""
