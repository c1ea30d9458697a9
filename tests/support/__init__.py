"""Helpers that tests share: made-up runs, drivers, projects and workers of known behaviour."""
