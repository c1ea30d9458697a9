"""Ops of a whole network: one family a file, declared as in `ops/`. Their implementations are the
stacks (`network.calls`)."""
