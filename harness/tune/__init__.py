"""Timing of the configurations of a kernel file."""
