"""A worker that verifies several ops of an implementation in turn by the harness's own bench.

Importing a compiler or a library takes longer than checking one of its ops.
"""

from harness.project import registry
from harness.verify import worker


class Bench:
    def __init__(self, op, impl, seed):
        self.impl, self.seed = impl, seed
        # If the library is absent, this raises as the harness's own bench does.
        registry.function(op, impl)
        self.version = registry.version(impl)
        self.bench = None

    def prepare(self, op, **plan):
        self.bench = worker.Bench(op, self.impl, self.seed)
        return self.bench.prepare(**plan)

    def check(self, unit):
        return self.bench.check(unit)
