"""Verification of one implementation of one op."""
