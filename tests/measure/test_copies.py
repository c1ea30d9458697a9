"""Check that each copy of the inputs that is timed in turn is compared, not only the first."""

import pytest
import torch

from harness import status
from harness.measure import worker
from tests.support.cpu_worker import CELL, Timer, Turned, cell

COPIES = range(worker.COPIES)


def spoiling(spoilt, harm):
    """Imitate a capture after which one copy's replay goes wrong, by `harm` to its outputs."""
    original, captured = Timer.capture, []

    def capture(self, call):
        replay, outputs = original(self, call)
        captured.append(call)
        if len(captured) - 1 != spoilt:
            return replay, outputs

        def wrong():
            replay()
            for output in outputs:
                harm(output.data)

        return wrong, outputs

    return capture


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("spoilt", COPIES)
@pytest.mark.parametrize(
    "harm", [torch.Tensor.zero_, lambda output: output[-1:].add_(1)], ids=["zeros", "one entry"]
)
def test_a_graph_of_which_one_copy_goes_wrong_is_found(make, monkeypatch, pass_, spoilt, harm):
    monkeypatch.setattr(Timer, "capture", spoiling(spoilt, harm))
    with pytest.raises(status.Inaccurate, match="a timed call"):
        cell(make(lambda x, bias: torch.sin(x)), pass_, calls=2 * worker.COPIES)
    assert len(COPIES) == 3


@pytest.mark.parametrize("spoilt", COPIES)
def test_a_graph_that_writes_nothing_of_one_copy_is_found(make, monkeypatch, spoilt):
    captured = []

    def capture(self, call):
        replay, outputs = Timer.capture(self, call)
        captured.append(call)
        return (replay if len(captured) - 1 != spoilt else lambda: None), outputs

    class Lazy(Timer):
        pass

    Lazy.capture = capture
    monkeypatch.setattr(worker, "Timer", Lazy)
    with pytest.raises(status.Inaccurate, match="a timed call"):
        cell(make(lambda x, bias: torch.sin(x)), calls=2 * worker.COPIES)


@pytest.mark.parametrize("spoilt", COPIES)
def test_a_call_in_place_is_checked_in_each_copy(make, monkeypatch, spoilt):
    monkeypatch.setattr(Timer, "capture", spoiling(spoilt, torch.Tensor.zero_))
    made = make(lambda x, bias: Turned.apply(x), "rival", in_place=True)
    with pytest.raises(status.Inaccurate, match="a timed call"):
        cell(made, calls=2 * worker.COPIES)


@pytest.mark.parametrize("spoilt", COPIES)
def test_without_a_graph_each_copy_is_checked_as_well(make, monkeypatch, spoilt):
    monkeypatch.setattr(Timer, "capture", lambda self, call: 1 / 0)
    addresses, counts = [], {}

    def function(x, bias):
        if x.data_ptr() not in addresses:
            addresses.append(x.data_ptr())
        counts[x.data_ptr()] = counts.get(x.data_ptr(), 0) + 1
        out = torch.sin(x)
        late = counts[x.data_ptr()] > 2
        # The last call is right; it is an extra one with a check of its own.
        return out * 0 if late and not last and x.data_ptr() == addresses[spoilt] else out

    last = []
    made = make(function)
    made.prepare(**CELL, pass_="forward")
    made.block(2 * worker.COPIES)
    last.append(True)
    with pytest.raises(status.Inaccurate, match="a timed call"):
        made.check()
