"""The commands that build, verify, measure and summarize: `python -m harness.<verb>`."""
