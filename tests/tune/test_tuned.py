"""Check tables of tuned configurations: when one binds, faulty entries, merging."""

import dataclasses
import json
import sys

import pytest
import torch
import triton

from harness.build import tables
from harness.cli import UserError
from harness.tune import merge
from kernels import softmax
from kernels._runtime import configs as _tuned
from kernels._runtime.configs import Configs
from tests.support import kernel_files
from tests.support.modules import loaded

CUDA = torch.device("cuda", 0)
KEY = {"n": 4096, "itemsize": 2}
CONFIG = {"BLOCK_M": 7, "num_warps": 1}
RULE = softmax.FORWARD_ROW.choose(**KEY)


def entry(key=KEY, config=CONFIG, timed=("BLOCK_M=7 num_warps=1",), failed=()):
    return {
        "key": key,
        "config": config,
        "timed": dict.fromkeys(timed, 1.0),
        "failed": dict.fromkeys(failed, "out of resources"),
    }


def record(*entries, kernel=softmax._forward_row_kernel, **changes):
    digest = changes.pop("source_sha256", _tuned.source_sha256(kernel))
    kernels = {kernel.fn.__name__: {"source_sha256": digest, "keys": list(entries or [entry()])}}
    return {"triton": triton.__version__, "dirty": False, "kernels": kernels} | changes


def table(a_record=None, device="Fake GPU", family="softmax"):
    return {"device": device, "families": {family: a_record or record()}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make a folder of tables that binds, on a machine with one Fake GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake GPU")
    monkeypatch.setenv(_tuned.MODE, str(tmp_path))
    return tmp_path


def put(folder, content, name="fake-gpu.json"):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def pick(configs=softmax.FORWARD_ROW, device=CUDA, **key):
    # A copy has not asked for a table yet.
    return dataclasses.replace(configs).pick(device, **(key or KEY))


def test_a_table_of_this_gpu_binds(folder):
    put(folder, table())
    assert pick() == CONFIG != RULE


@pytest.mark.parametrize(
    "content",
    [
        table(device="Another GPU"),
        table(family="layer_norm"),
        table(record(entry(key={"n": 4096, "itemsize": 4}))),
        table(record(entry(key={"n": 4096}))),
        table(record(kernel=softmax._backward_row_kernel)),
    ],
    ids=["another GPU", "another file", "another key", "a key of other names", "another kernel"],
)
def test_elsewhere_the_rule_chooses(folder, content):
    put(folder, content)
    assert pick() == RULE


def test_without_a_gpu_the_rule_chooses(folder):
    put(folder, table())
    assert pick(device=torch.device("cpu")) == pick(device=torch.device("meta")) == RULE


@pytest.mark.parametrize(
    "content",
    [table(record(source_sha256="0" * 64)), table(record(triton="3.5.0"))],
    ids=["the kernel has changed", "another compiler"],
)
def test_a_stale_entry_does_not_bind(folder, content):
    put(folder, content)
    assert pick() == RULE


def test_the_variable_says_which_tables_bind(folder, tmp_path_factory, monkeypatch):
    put(folder, table())
    committed = tmp_path_factory.mktemp("committed")
    put(committed, table(record(entry(config={"BLOCK_M": 9, "num_warps": 1}))))
    monkeypatch.setattr(_tuned, "COMMITTED", committed)
    assert pick() == CONFIG
    monkeypatch.setenv(_tuned.MODE, "")
    assert pick() == RULE
    monkeypatch.delenv(_tuned.MODE)
    assert pick() == {"BLOCK_M": 9, "num_warps": 1}
    monkeypatch.setattr(_tuned, "COMMITTED", committed / "absent")
    assert pick() == RULE


def test_tables_of_several_files_bind_together(folder):
    put(folder, table())
    backward = softmax._backward_row_kernel
    put(folder, table(record(kernel=backward), family="other"), "other.json")
    assert pick() == CONFIG
    put(folder, table(), "again.json")
    _tuned.families.cache_clear()
    with pytest.raises(ValueError, match=r"fake-gpu.json: softmax is also in .*again.json"):
        pick()


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"device": "Fake GPU"}),
        json.dumps({"device": "Fake GPU", "families": {"softmax": {}}}),
        json.dumps(table({"triton": "1", "kernels": {"k": {"source_sha256": "0"}}})),
        json.dumps(table(record(entry(config={"BLOCK_M": "7"})))),
        json.dumps(table(record(entry(config={})))),
        json.dumps(table(record(entry(key={})))),
    ],
)
def test_a_broken_table_is_one_clear_error(folder, content):
    put(folder, content)
    with pytest.raises(ValueError, match=r"fake-gpu.json: no table of tuned") as caught:
        pick()
    assert _tuned.REMEDY in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_folder_that_is_not_there_is_an_error(folder, monkeypatch):
    monkeypatch.setenv(_tuned.MODE, "nowhere")
    with pytest.raises(ValueError, match=r"TILEWRIGHT_TUNED=nowhere: no such folder; tune again"):
        pick()


def test_a_table_is_read_once_and_asking_is_cheap(folder):
    put(folder, table())
    configs = dataclasses.replace(softmax.FORWARD_ROW)
    assert configs.pick(CUDA, **KEY) == CONFIG
    (folder / "fake-gpu.json").unlink()
    assert configs.pick(CUDA, **KEY) == CONFIG
    # A known key costs a look-up; no table is read and no rule asked. The cost is counted in Python
    # calls, because a clock would depend on how busy the machine is.
    called = []
    sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code.co_name))
    try:
        configs.pick(CUDA, **KEY)
    finally:
        sys.setprofile(None)
    assert [name for name in called if name != "is_dynamo_compiling"] == ["pick"]


class Sealed:
    """A kernel that must not be traced, as real ones if Triton has a GPU."""

    @property
    def fn(self):
        assert not torch.compiler.is_compiling()
        return softmax._forward_row_kernel.fn


def traced(dynamic):
    """Compile a function of a tensor that asks for a configuration; count its graphs."""
    configs, graphs = dataclasses.replace(softmax.FORWARD_ROW, kernel=Sealed()), []

    def scaled(x):
        return x * configs.pick(CUDA, n=x.shape[0], itemsize=2)["BLOCK_M"]

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(scaled, backend=backend, fullgraph=True, dynamic=dynamic)
    return lambda n: compiled(torch.ones(n))[0].item(), graphs


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_the_choice_can_be_traced(folder, dynamic):
    put(folder, table())
    call, _ = traced(dynamic)
    assert call(4096) == (RULE["BLOCK_M"] if dynamic else 7)
    assert call(4000) == softmax.FORWARD_ROW.choose(n=4000, itemsize=2)["BLOCK_M"]
    assert call(300) == softmax.FORWARD_ROW.choose(n=300, itemsize=2)["BLOCK_M"]
    # A size that has become symbolic follows the rule.
    assert call(4096) == (7 if dynamic is False else RULE["BLOCK_M"])


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_the_choice_can_be_traced_within_an_autograd_function(folder, dynamic):
    put(folder, table())
    configs = dataclasses.replace(softmax.FORWARD_ROW, kernel=Sealed())

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * configs.pick(CUDA, n=x.shape[0], itemsize=2)["BLOCK_M"]

        @staticmethod
        def backward(ctx, dy):
            return dy * configs.pick(CUDA, n=dy.shape[0], itemsize=2)["BLOCK_M"]

    torch.compiler.reset()
    compiled = torch.compile(Scaled.apply, backend="eager", fullgraph=True, dynamic=dynamic)
    for n in (300, 400, 4096):
        x = torch.ones(n, requires_grad=True)
        y = compiled(x)
        (dx,) = torch.autograd.grad(y, x, torch.ones(n))
        assert torch.equal(y, dx)


def test_sizes_that_no_table_knows_share_a_graph(folder):
    put(folder, table())
    call, graphs = traced(True)
    for n in range(3000, 3020):
        assert call(n) == 1
    assert len(graphs) == 1


def test_a_tune_run_sees_no_table(folder, monkeypatch):
    put(folder, table())
    monkeypatch.setenv(_tuned.MODE, "")
    call, _ = traced(None)
    assert call(4096) == RULE["BLOCK_M"]


KERNELS = """
import triton
import triton.language as tl

SCALE = tl.constexpr({scale})


@triton.jit
def _twice(x):
    return x * {factor}


@triton.jit
def _kernel(x_ptr, N, BLOCK_N: tl.constexpr):
    offs = tl.arange(0, BLOCK_N){comment}
    tl.store(x_ptr + offs, _twice(tl.load(x_ptr + offs)) * SCALE)
"""


def digest(tmp_path, text):
    path = tmp_path / f"toy{len(list(tmp_path.iterdir()))}.py"
    path.write_text(text)
    return _tuned.source_sha256(loaded(path)._kernel)


def test_the_digest_follows_the_program_not_the_text(tmp_path):
    plain = {"factor": 2, "scale": 1.0, "comment": ""}
    first = digest(tmp_path, KERNELS.format(**plain))
    assert digest(tmp_path, "# moved down\n\n" + KERNELS.format(**plain)) == first
    assert digest(tmp_path, KERNELS.format(**plain | {"comment": "  # a remark"})) == first
    assert digest(tmp_path, KERNELS.format(**plain | {"factor": 3})) != first
    assert digest(tmp_path, KERNELS.format(**plain | {"scale": 2.0})) != first
    assert digest(tmp_path, KERNELS.format(**plain | {"comment": " + N"})) != first


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run" / "tuned").mkdir(parents=True)
    return tmp_path / "run"


def kept(into, name="h200.json"):
    return json.loads((into / name).read_text())


def test_a_run_is_merged_by_gpu_and_family(run, tmp_path):
    into = tmp_path / "kernels" / "tuned"
    h200 = {"device": "NVIDIA H200"}
    put(run / "tuned", table(**h200), "softmax.json")
    put(run / "tuned", table(record(run_id="r1"), **h200, family="attention"), "attention.json")
    assert merge.merge(run, into, allow_dirty=False) == [
        (into / "h200.json", "attention"),
        (into / "h200.json", "softmax"),
    ]
    assert kept(into)["device"] == "NVIDIA H200"
    assert list(kept(into)["families"]) == ["attention", "softmax"]
    before = (into / "h200.json").read_text()
    merge.merge(run, into, allow_dirty=False)
    assert (into / "h200.json").read_text() == before
    # Tuning one family anew replaces all of its old entries and leaves the others.
    (run / "tuned" / "softmax.json").unlink()
    put(run / "tuned", table(record(run_id="r2"), **h200, family="attention"), "attention.json")
    merge.merge(run, into, allow_dirty=False)
    assert kept(into)["families"]["attention"]["run_id"] == "r2"
    assert "softmax" in kept(into)["families"]
    put(run / "tuned", table(device="NVIDIA A100-SXM4-80GB"), "softmax.json")
    merge.merge(run, into, allow_dirty=False)
    assert list(kept(into, "a100-sxm4-80gb.json")["families"]) == ["softmax"]


def test_a_merged_table_binds(folder, run, tmp_path):
    put(run / "tuned", table(), "softmax.json")
    merge.merge(run, folder, allow_dirty=False)
    assert pick() == CONFIG


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "run/tuned: holds no table; make them with tuning: tune"),
        ("{", "softmax.json: no table of tuned configurations"),
        (table(record(dirty=True)), "softmax.json: tuned uncommitted code; commit it"),
    ],
)
def test_a_run_that_cannot_be_kept_changes_nothing(run, tmp_path, content, message):
    into = tmp_path / "into"
    put(run / "tuned", table(), "attention.json") if content else None
    put(run / "tuned", content, "softmax.json") if content else None
    with pytest.raises(UserError, match=message):
        merge.merge(run, into, allow_dirty=False)
    assert not into.exists()


def test_entries_that_do_not_bind_are_listed(folder):
    configs = softmax.FORWARD_ROW
    every = {
        " ".join(f"{k}={v}" for k, v in each.items())
        for each in configs.candidates
        if configs.suits(each, **KEY)
    }
    assert len(every) > 2
    put(folder, table(record(entry(timed=every))))
    assert tables.findings("softmax", folder) == []
    # A candidate that failed was seen; a candidate that was added since was not.
    first, second, *others = sorted(every)
    put(folder, table(record(entry(timed=others, failed=[first]))))
    [finding] = tables.findings("softmax", folder)
    assert finding["state"] == "incomplete" and finding["reason"] == f"never tried: {second}"
    assert finding["table"] == "fake-gpu.json" and finding["kernel"] == "_forward_row_kernel"
    assert pick() == CONFIG
    put(folder, table(record(triton="3.5.0")))
    [finding] = tables.findings("softmax", folder)
    assert finding["state"] == "stale" and "triton 3.5.0" in finding["reason"]
    put(folder, table(record(source_sha256="0")))
    assert tables.findings("softmax", folder)[0]["reason"] == "the kernel has changed since"
    gone = record()
    gone["kernels"]["_old_kernel"] = gone["kernels"].pop("_forward_row_kernel")
    put(folder, table(gone))
    assert tables.findings("softmax", folder)[0]["reason"] == "the file has no such kernel"
    assert tables.findings("layer_norm", folder) == []
    put(folder, "{")
    with pytest.raises(UserError, match=r"fake-gpu.json: no table"):
        tables.findings("softmax", folder)


def test_a_table_may_have_each_kernel_of_a_file_and_of_its_folder():
    """As seen: a kernel that moved into the folder could be timed, and not written down."""
    declared = {
        value
        for module in kernel_files.modules()
        for value in vars(module).values()
        if isinstance(value, Configs)
    }
    for stem in {each.family for each in declared}:
        assert set(tables.tunable(stem).values()) == {x for x in declared if x.family == stem}
