"""The forms of kernels: each is reached, judged by the shipped one, and takes its turn."""

import dataclasses
import functools
import importlib
import types

import pytest

from harness.build import recorder
from harness.measure.dissect import form_worker, ladders
from harness.measure.dissect.messages import FormReady
from harness.measure.dissect.rungs import LADDERS, SHIPPED, Rung
from harness.project import registry
from harness.status import Unsupported
from tests.support import faulty_forms
from tests.support.dissected import written

pytestmark = pytest.mark.no_gpu
PRODUCT, ROWS = "M160-N136-K72.forward", "B1-H2-S140-D64"
FORMS = [(op, rung) for (op, _), forms in LADDERS.items() for rung in forms]


def declared(op):
    return form_worker.declared(registry.op(op)[1])


@pytest.mark.parametrize("op, rung", FORMS, ids=[f"{op}: {rung.adds}" for op, rung in FORMS])
def test_a_rung_names_what_is_there(op, rung):
    known = declared(op)
    assert rung is SHIPPED or rung.kernel in rung.configs
    for name, config in rung.configs.items():
        assert config.keys() == known[name].candidates[0].keys()
        # Triton's own kernels take any tile; one of Gluon is written for some.
        assert "hopper" not in name or config in known[name].candidates
    for target in rung.without:
        place, _, names = target.partition(":")
        owner = functools.reduce(getattr, names.split("."), importlib.import_module(place))
        assert callable(owner)


@pytest.mark.parametrize("ladder", LADDERS.values(), ids=map(str, LADDERS))
def test_a_ladder_ends_with_the_shipped_form_and_repeats_none(ladder):
    assert ladder[-1] is SHIPPED and ladder.count(SHIPPED) == 1
    assert len({rung.adds for rung in ladder}) == len(ladder)
    forms = [(rung.kernel, sorted(map(str, rung.configs.items()))) for rung in ladder]
    assert all(forms.count(form) == 1 for form in forms)


@pytest.mark.slow
@pytest.mark.parametrize(
    "op, cells", [("matmul", [PRODUCT]), ("attention", [f"{ROWS}.forward", f"{ROWS}.backward"])]
)
def test_the_portable_forms_run_on_a_cpu_and_the_others_say_that_they_do_not(
    op, cells, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    rows = ladders.kernel_ladder(op, cells, "bfloat16", ["torch_eager"], 2, 0)
    found = written(tmp_path, f"{op}_ladder", rows)
    assert (found.loc[found["impl"] == "torch_eager", "status"] == "ok").all()
    for pass_, rows in found[found["impl"] == "ours"].groupby("pass"):
        for number, rung in enumerate(LADDERS[op, pass_]):
            form = rows[rows["rung"] == number]
            assert (form["adds"] == rung.adds).all()
            if "hopper" in rung.kernel:
                assert form["status"].tolist() == ["unsupported"]
                assert f"{rung.kernel} does not take this problem" in form["reason"].iloc[0]
            else:
                assert form["status"].tolist() == ["ok"] * 2 and form["block"].tolist() == [0, 1]
                assert (form["device_us"] > 0).all() and (form["flops"] > 0).all()


# By fault, the row that comes of it.
LOST = {
    "raises": ("crashed", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    "declines": ("unsupported", "ValueError: only even sizes"),
    "does not fit": ("unsupported", "shared memory, Required: 400000, Hardware limit: 232448"),
    "dies": ("crashed", "died by SIGKILL"),
    "is wrong": ("inaccurate", "times as far from that of the shipped form as it may be"),
    "raises later": ("crashed", "RuntimeError: CUDA error: an illegal memory access"),
    "dies later": ("crashed", "died by SIGKILL"),
    "exits later": ("crashed", "exited with code 3"),
    "hangs later": ("hung", "no answer within 6 s"),
    "is wrong later": ("inaccurate", "times as far from that from before the timing as it may be"),
    "forgets its form": ("unsupported", "_pointer_kernel does not take this problem"),
}


def faulty(worker, forms, rivals, folder, **limits):
    """Return the rows of a ladder of faulty forms and of rivals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setitem(LADDERS, faulty_forms.LADDER, forms)
        for name, value in limits.items():
            patch.setattr(ladders, name, value)
        worker = f"tests.support.faulty_forms:{worker}"
        cells = ["M64-N64-K64.forward"]
        rows = ladders.kernel_ladder("matmul", cells, "bfloat16", rivals, 3, 0, worker)
        return written(folder, "matmul_ladder", rows)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder, rivals = tmp_path_factory.mktemp("ladder"), ["absent", "torch_eager"]
    return faulty("FaultyForm", faulty_forms.FORMS, rivals, folder, LIMIT_S=6.0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", LOST)
def test_a_form_that_fails_is_one_row_without_a_time(found, fault):
    rows, (status, reason) = found[found["adds"] == fault], LOST[fault]
    assert rows["status"].tolist() == [status] and reason in rows["reason"].iloc[0]
    assert rows[["device_us", "block"]].isna().all(axis=None) and (rows["flops"] > 0).all()


@pytest.mark.slow
def test_forms_that_fail_leave_the_others_their_times(found):
    assert set(faulty_forms.FAULTS) == {"none", *LOST}
    timed = found[found["status"] == "ok"]
    assert len(timed) == 9 and (timed["device_us"] > 0).all()
    for which in (timed["adds"] == "none", timed["adds"] == SHIPPED.adds, timed["rung"].isna()):
        assert timed.loc[which, "block"].tolist() == [0, 1, 2]


@pytest.mark.slow
def test_a_rival_that_is_not_installed_is_a_row(found):
    (row,) = found[found["impl"] == "absent"].to_dict("records")
    assert (row["status"], row["reason"]) == ("unavailable", "No module named 'absent'")


@pytest.mark.slow
def test_failures_come_first_in_the_order_in_which_they_are_met(found):
    prepared = ["raises", "declines", "does not fit", "dies", "is wrong", ""]
    later = [fault for fault in LOST if fault not in prepared]
    assert found["adds"].fillna("").tolist()[:12] == prepared + later
    # In a random order, which the seed gives.
    orders = found[12:].groupby("block")["adds"].apply(lambda adds: adds.fillna("").tolist())
    assert all(sorted(order) == ["", SHIPPED.adds, "none"] for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_without_the_shipped_form_no_other_is_judged(tmp_path):
    found = faulty("WithoutShipped", faulty_forms.PAIR, [], tmp_path)
    assert found["rung"].tolist() == [1, 0] and found["device_us"].isna().all()
    assert found["status"].tolist() == ["oom", "unsupported"]
    assert found["reason"][1] == "the shipped form, which would judge it, has no results"


def test_watching_an_inherited_launch_leaves_no_copy():
    class Kernel:
        def run(self, x):
            return x

    class Special(Kernel):
        pass

    kernel, other = Special(), Special()
    with recorder.launches(kernel) as calls:
        assert (kernel.run(1), other.run(2)) == (1, 2)
    assert [call() for call in calls] == [1]
    assert "run" not in vars(Special) and "run" in vars(Kernel)


def test_a_form_is_left_as_it_was_found():
    known, rung = declared("matmul"), LADDERS["matmul", "forward"][0]
    hopper = importlib.import_module("kernels.matmul_details.hopper")
    before = hopper.suits, known["_pointer_kernel"].pick.__func__
    with pytest.raises(KeyError), form_worker.forced("matmul", rung):
        assert hopper.suits(None, None) is None
        assert known["_pointer_kernel"].pick(None) == rung.configs["_pointer_kernel"]
        raise KeyError
    assert (hopper.suits, known["_pointer_kernel"].pick.__func__) == before


def test_a_pass_without_a_ladder_is_named():
    rows = ladders.kernel_ladder("matmul", ["M8-N8-K8.backward"], "float32", [], 1, 0)
    with pytest.raises(ValueError, match=r"M8-N8-K8\.backward: matmul has no ladder of this pass"):
        list(rows)


def test_the_kernel_of_a_rung_must_be_launched():
    rung = dataclasses.replace(LADDERS["matmul", "forward"][0], without=())
    descriptors = LADDERS["matmul", "forward"][3]
    assert isinstance(rung, Rung)
    op, _ = registry.op("matmul")
    function, cell = registry.function("matmul", "ours"), ("M64-N64-K64", "bfloat16", "forward")
    problem = form_worker.Problem(op, function, *cell, gpu=False)
    with (
        pytest.raises(Unsupported, match="_pointer_kernel does not take"),
        form_worker.forced("matmul", rung),
        form_worker.reached("matmul", rung),
    ):
        problem.run()
    with form_worker.forced("matmul", descriptors), form_worker.reached("matmul", descriptors):
        problem.run()


@pytest.mark.parametrize("device_us, calls", [(1.0, 3000), (700.0, 5), (9e4, 3)])
def test_on_a_gpu_a_block_is_as_long_as_in_the_study(monkeypatch, device_us, calls):
    class MeasureWorker:
        def __init__(self, *about):
            assert about == ("matmul", "ours", 7)

        def prepare(self, *cell):
            assert cell == ("M8", "bfloat16", "forward")
            return types.SimpleNamespace(remark="events: no graph")

        def block(self, calls, turn=0):
            return types.SimpleNamespace(device_us=device_us, asked=(calls, turn))

        def check(self):
            return "checked"

    monkeypatch.setattr("harness.measure.worker.MeasureWorker", MeasureWorker)
    timed = form_worker._OnGpu("matmul", "ours", 7)
    assert timed.prepare("M8", "bfloat16", "forward") == FormReady("events: no graph", calls)
    assert timed.block(5, 2).asked == (5, 2) and timed.check() == "checked"
