"""A worker that can compile a cell without timing it, for libraries that tune themselves."""

import torch

from harness.calls import drawn
from harness.measure import candidates, messages
from harness.measure.worker import MeasureWorker


class TuningWorker(MeasureWorker):
    """See `MeasureWorker`, whose requests it serves as well."""

    requests = (*messages.REQUESTS, messages.Compile)

    def compile(
        self, case: str, dtype: str, pass_: str, candidate: int | None
    ) -> messages.Compiled:
        """Call a cell once, with one candidate of each tuner of Triton's."""
        with candidates.only(candidate) as counts, torch.cuda.stream(self._timer.stream):
            call, *_ = self._call(drawn.named(self._op, case), dtype, pass_, self._seed)
            with self._declining():
                call()
                torch.cuda.synchronize()
        return messages.Compiled(max(counts, default=1))
