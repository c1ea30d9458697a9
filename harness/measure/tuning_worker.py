"""A worker that can compile a cell without timing it, for libraries that tune themselves."""

import torch

from harness.calls import candidates, drawn
from harness.measure import messages
from harness.measure.worker import MeasureWorker


class TuningWorker(MeasureWorker):
    """See `MeasureWorker`, whose requests it serves as well."""

    requests = (*messages.REQUESTS, messages.Compile)

    def compile(
        self, case: str, dtype: str, pass_: str, candidate: int | None
    ) -> messages.Compiled:
        """Call a cell once, with one candidate of each tuner of Triton's.

        The forward pass that a call with gradients needs first has the last candidate, whichever
        the call has. The others are compiled by the calls of that pass, some for minutes.
        """
        with torch.cuda.stream(self._timer.stream):
            with candidates.only(None):
                call, *_ = self._call(drawn.named(self._op, case), dtype, pass_, self._seed)
            with candidates.only(candidate) as counts, self._declining():
                call()
                torch.cuda.synchronize()
        return messages.Compiled(max(counts, default=1))
