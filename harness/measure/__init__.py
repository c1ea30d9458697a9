"""Timing of all implementations of one op."""
