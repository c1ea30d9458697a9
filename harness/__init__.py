"""The commands that build, verify, measure and summarize: `python -m harness.<verb>`.

A stage is a room. Its `__main__.py` is the command, in a process without torch that no library can
end; its `worker.py` runs in a process that may die. Rooms without a command hold what stages share.
pyproject.toml says which room may import which.
"""
