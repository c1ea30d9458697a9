"""The forms of kernels: each is reached, judged by the shipped one, and takes its turn."""

import dataclasses
import functools
import importlib

import pytest

from harness import status
from harness.build import recorder
from harness.measure.dissect import ladders
from harness.measure.dissect.rungs import LADDERS, SHIPPED, Rung
from harness.project import registry
from tests.support.dissected import written

pytestmark = pytest.mark.no_gpu
PRODUCT, ROWS = "M160-N136-K72.forward", "B1-H2-S140-D64"
FORMS = [(op, rung) for (op, _), forms in LADDERS.items() for rung in forms]


def declared(op):
    return ladders.declared(registry.op(op)[1])


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


@pytest.mark.parametrize(
    "op, cells", [("matmul", [PRODUCT]), ("attention", [f"{ROWS}.forward", f"{ROWS}.backward"])]
)
def test_the_portable_forms_run_on_a_cpu_and_the_others_say_that_they_do_not(op, cells, tmp_path):
    rows = ladders.kernel_ladder(op, cells, "bfloat16", ["torch_eager"], 2, 0, gpu=False)
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


def test_a_form_with_other_results_has_no_time(monkeypatch):
    plain, calls = ladders._Judge.run, []

    def run(judge, impl):
        calls.append(impl)
        found = plain(judge, impl)
        # The first call is that of the shipped form.
        return found if len(calls) == 1 else {name: t + 1 for name, t in found.items()}

    monkeypatch.setattr(ladders._Judge, "run", run)
    monkeypatch.setitem(LADDERS, ("matmul", "forward"), (LADDERS["matmul", "forward"][2], SHIPPED))
    found = list(ladders.kernel_ladder("matmul", [PRODUCT], "float32", [], 1, 0, gpu=False))
    (lost,) = (row for row in found if row["rung"] == 0)
    assert lost["status"] == "inaccurate" and "from that of the shipped form" in lost["reason"]
    assert "device_us" not in lost


def test_a_form_that_fails_its_last_check_has_no_time(monkeypatch):
    def check(timed):
        checked.append(timed)
        if len(checked) == 2:
            raise status.Inaccurate("not bitwise equal")
        return [{}]

    checked = []
    monkeypatch.setattr(ladders._Timed, "check", check)
    monkeypatch.setitem(LADDERS, ("matmul", "forward"), (LADDERS["matmul", "forward"][2], SHIPPED))
    found = list(ladders.kernel_ladder("matmul", [PRODUCT], "float32", [], 2, 0, gpu=False))
    assert [row["status"] for row in found if row["rung"] == 0] == ["inaccurate"]
    assert [row["status"] for row in found if row["rung"] == 1] == ["ok", "ok"]


def test_without_the_shipped_form_no_other_is_judged(monkeypatch):
    def run(judge, impl):
        calls.append(impl)
        if len(calls) == 1:
            raise RuntimeError("CUDA out of memory")
        return plain(judge, impl)

    plain, calls = ladders._Judge.run, []
    monkeypatch.setattr(ladders._Judge, "run", run)
    monkeypatch.setitem(LADDERS, ("matmul", "forward"), (LADDERS["matmul", "forward"][2], SHIPPED))
    found = list(ladders.kernel_ladder("matmul", [PRODUCT], "float32", [], 1, 0, gpu=False))
    assert not any("device_us" in row for row in found) and len(found) == 2
    (judged,) = (row for row in found if row["rung"] == 0)
    assert judged["reason"] == "the shipped form, which would judge it, has no results"


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
    with pytest.raises(KeyError), ladders.forced("matmul", rung):
        assert hopper.suits(None, None) is None
        assert known["_pointer_kernel"].pick(None) == rung.configs["_pointer_kernel"]
        raise KeyError
    assert (hopper.suits, known["_pointer_kernel"].pick.__func__) == before


def test_a_pass_without_a_ladder_is_named():
    rows = ladders.kernel_ladder("matmul", ["M8-N8-K8.backward"], "float32", [], 1, 0, gpu=False)
    with pytest.raises(ValueError, match=r"M8-N8-K8\.backward: matmul has no ladder of this pass"):
        list(rows)


def test_the_kernel_of_a_rung_must_be_launched():
    rung = dataclasses.replace(LADDERS["matmul", "forward"][0], without=())
    descriptors = LADDERS["matmul", "forward"][3]
    assert isinstance(rung, Rung)
    judge = ladders._Judge("matmul", "M64-N64-K64", "bfloat16", "forward", gpu=False)
    with (
        pytest.raises(Exception, match="_pointer_kernel does not take"),
        ladders.forced("matmul", rung),
    ):
        judge.run("ours")
    with ladders.forced("matmul", descriptors):
        judge.run("ours")
