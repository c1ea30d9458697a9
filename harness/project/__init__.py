"""Reads what the source tree declares: ops, implementations, libraries, digests."""
