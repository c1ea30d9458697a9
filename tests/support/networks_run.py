"""Make a run that has timed a network and taken a step of it apart; all numbers are made up."""

from pathlib import Path

from harness.measure.dissect.__main__ import write
from harness.results import columns
from tests.support import synthetic

CASES = {
    "model_train_step": (
        ("B16-S1024-V50257-N124439808-gpt2_124m", 60e3, 1.4e13),
        ("B1-S16384-V128256-N1235814400-llama_1b", 440e3, 1.7e14),
    ),
    "model_decode": (("B1-S1024-T128-V128256-N1235814400-llama_1b", 275e3, 5e12),),
}
STACKS = {
    "ours": 1.4, "ours_twin": 1.4, "torch_eager": 1.0, "liger": 1.25, "xformers": 0.97,
    "torch_eager_with_swiglu": 1.03,
}  # fmt: skip
# The wall time of a call over its GPU time: the host holds ours up, and eager PyTorch hardly.
HOST = {"ours": 2.2, "ours_twin": 2.2, "torch_eager": 1.1, "liger": 1.6, "xformers": 1.2}
BLOCKS = 5
OOM = {"status": "oom", "reason": "CUDA out of memory. Tried to allocate 3.00 GiB"}
STEP = {
    "preset": "llama-1b", "batch": 4, "length": 4096, "dtype": "bfloat16", "status": "ok",
    "gpu": "NVIDIA H200",
}  # fmt: skip
PARTS = {"linear": 130.0, "attention": 48.0, "rotary": 20.0, "swiglu": 14.0, "optimizer": 6.0}
GAINS = {"attention": 1.5, "rotary": 12.0, "swiglu": 2.0}


def write_run(folder: Path) -> Path:
    """Write raw rows of the ops of a network, and the files of a dissected step, into a run."""
    for op, cases in CASES.items():
        synthetic.write_raw(folder, op, [row for case in cases for row in raw_rows(op, *case)])
        for impl in set(STACKS) - {"ours_twin"}:
            synthetic._report(folder, op, impl, "gpu")
    for name, rows in DISSECTED.items():
        write(folder / "dissect" / f"{name}.csv", columns.DISSECTED[name], rows())
    return folder


def raw_rows(op, case, us, flops):
    common = dict.fromkeys(synthetic.HEADER.split(","), "") | {
        "op": op, "family": "model", "case": case, "dtype": "bfloat16", "pass": "forward",
        "impl_version": "1", "bytes_read": 8 * 10**9, "bytes_written": 10**6, "flops": int(flops),
    }  # fmt: skip
    for impl, speed in STACKS.items():
        row = common | {"impl": impl}
        if impl == "torch_eager" and "S16384" in case:
            yield row | {"block": 0, "order": 0} | OOM
            continue
        for block in range(BLOCKS):
            device = us / speed * (1 + 0.001 * block)
            call = us / speed * HOST.get(impl, 1.3) * (1 + 0.004 * block)
            yield row | {
                "block": block, "order": 0, "device_us": f"{device:.4f}", "calls": 3,
                "call_us": f"{call:.4f}", "peak_mem_bytes": int(4e10 / speed), "status": "ok",
                "energy_uj": f"{600 * device:.1f}" if block == BLOCKS - 1 else "",
                "reason": f"events: parked; {columns.SUSTAINED}; {_launched(op, impl)}",
            }  # fmt: skip


def _launched(op, impl):
    if op == "model_decode":
        return "a decoded token is a CUDA graph"
    return "the host launches each kernel" if impl == "liger" else "a step is a CUDA graph"


def _step_parts():
    for stack, speed in (("torch_eager", 1.0), ("ours", 1.3)):
        for part, ms in PARTS.items():
            for way, share in (("forward", 1 / 3), ("backward", 2 / 3)):
                us = 1e3 * ms * share / speed
                yield STEP | {"stack": stack, "part": part, "pass": way, "us": us, "step_us": 25e4}


def _parts_alone():
    for part, gain in GAINS.items():
        for stack, us in (("torch_eager", 1e4), ("ours", 1e4 / gain)):
            yield STEP | {"stack": stack, "part": part, "calls": 16, "us": us}


def _step_ladder():
    for rung, part in enumerate(("", *GAINS)):
        for block in range(3):
            about = {"stack": f"rung {rung}", "over": "torch_eager", "rung": rung, "part": part}
            us = 25e4 - 1.2e4 * rung + 100 * block
            yield STEP | about | {"block": block, "us": us, "peak_mem_bytes": 4 * 10**10}


def _step_memory():
    for stack, most in (("torch_eager", 8192), ("ours", 32768)):
        for length in (2048, 4096, 8192, 16384, 32768):
            row = STEP | {"batch": 1, "stack": stack, "length": length}
            if length > most:
                yield row | OOM
                break
            yield row | {"us": 20.0 * length, "peak_mem_bytes": 10**6 * length}


def _step_power():
    """Half as much again as the cap for five steps, then the cap."""
    for stack, ms in (("torch_eager", 280), ("ours", 220)):
        at_s = energy_j = 0.0
        for call in range(20):
            seconds = ms / 1e3 * (1 if call < 5 else 1.15)
            at_s, energy_j = at_s + seconds, energy_j + (900 if call < 5 else 700) * seconds
            row = {"call": call, "us": 1e6 * seconds, "at_s": at_s, "energy_j": energy_j}
            yield STEP | row | {"stack": stack, "sm_mhz": 1980 if call < 5 else 1560}


def _loss_parity():
    for stack, seed in (("torch_eager", 0), ("torch_eager", 1), ("torch_eager", 2), ("ours", 0)):
        for step in range(36):
            loss = 11 * 0.97**step + 0.05 * seed * (-1) ** step + 0.01 * (stack == "ours")
            about = {"stack": stack, "seed": seed, "step": step, "text_sha256": "0" * 64}
            yield STEP | about | {"loss": loss}
    yield STEP | {"stack": "xformers", "seed": 0, "status": "unsupported", "reason": "absent"}


DISSECTED = {
    "step_parts": _step_parts,
    "parts_alone": _parts_alone,
    "step_ladder": _step_ladder,
    "step_memory": _step_memory,
    "step_power": _step_power,
    "loss_parity": _loss_parity,
}
