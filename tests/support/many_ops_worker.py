"""A worker that verifies one op of an implementation after another, by the harness's own worker.

To import a compiler or a library takes longer than to check one of its ops.
"""

from dataclasses import dataclass

from harness.project import registry
from harness.verify import messages, worker


@dataclass(frozen=True)
class ChooseOp(messages.ChooseUnits):
    op: str = ""


class ManyOpsWorker:
    requests = (ChooseOp, messages.CheckUnit)

    def __init__(self, op, impl, seed):
        self.impl, self.seed = impl, seed
        # If the library is absent, this raises as the harness's own worker does.
        registry.function(op, impl)
        self.version = registry.version(impl)
        self.worker = None

    def choose(self, op, **wanted):
        self.worker = worker.VerifyWorker(op, self.impl, self.seed)
        return self.worker.choose(**wanted)

    def check(self, unit, passes):
        return self.worker.check(unit, passes)
