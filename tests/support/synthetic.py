"""Make a run in the formats of docs/formats.md, for tests of code that reads runs.

Nothing in it was measured: times are the floor of an invented machine divided by invented
efficiencies, with noise from a fixed seed.
"""

import csv
import hashlib
import itertools
import json
import zlib
from pathlib import Path

import numpy as np

from harness.results import manifest, raw

RUN_ID = "20000101T0000Z-0000000-synthetic"
CEILINGS = {
    "read": ("GB/s", 4400.0),
    "write": ("GB/s", 4000.0),
    "copy": ("GB/s", 4200.0),
    "bfloat16": ("TFLOP/s", 700.0),
    "float16": ("TFLOP/s", 690.0),
    "float32": ("TFLOP/s", 50.0),
    "launch": ("us", 2.5),
}
HEADER = (
    "op,family,case,dtype,pass,impl,impl_version,block,order,device_us,call_us,calls,bytes_read,"
    "bytes_written,flops,peak_mem_bytes,sm_mhz,temp_c,power_w,energy_uj,energy_pm_uj,"
    "throttle,status,reason"
)
FAMILIES = {
    "scale": "vector",
    "add": "vector",
    "mul": "vector",
    "maximum": "vector",
    "minimum": "vector",
    "dot": "vector",
    "softmax": "softmax",
    "layer_norm": "layer_norm",
    "rms_norm": "rms_norm",
    "swiglu": "gated",
    "rotary": "rotary",
    "matmul": "matmul",
    "attention": "attention",
}
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
ATTENTION = ("flash_attn_3", "sdpa_cudnn", "sdpa_efficient", "sdpa_flash")
BLOCKS = 12
# A recorded verdict that rests on a mended fault of the gate.
MISCOUNT = "writes past the end of an output of 2 bytes"


def environment(run_id: str = RUN_ID, gpu: bool = True) -> dict:
    card = {
        "name": "Synthetic GPU",
        "uuid": "GPU-00000000",
        "sm": "sm_90",
        "memory_gib": 139.8,
        "driver": "000.00",
        "vbios": "00.00",
        "cuda": "13.0",
        "power_limit_w": 700,
        "power_default_w": 700,
        "sm_mhz": 1980,
        "mem_mhz": 3201,
        "max_sm_mhz": 1980,
        "max_mem_mhz": 3201,
        "ecc": True,
        "mig": False,
        "persistence": True,
    }
    return {
        "run_id": run_id,
        "date": "2000-01-01T00:00:00+00:00",
        "commit": "0" * 40,
        "dirty": False,
        "image": None,
        "python": "3.12.1",
        "platform": "Linux-6.1-x86_64-with-glibc2.39",
        "kernel": "6.1.0",
        "cpu": "Synthetic CPU",
        "cores": 16,
        "memory_gib": 128.0,
        "gpu": card if gpu else None,
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "xformers": None},
        "hashes": {"torch": "1" * 64, "triton": "2" * 64, "xformers": None},
        "config_sha256": "0" * 64,
    }


def block(number, impl, time, **other):
    """Return a row as `harness.results.raw` reads it: one block of add, too large for a cache."""
    row = dict.fromkeys(HEADER.split(",")) | {"op": "add", "family": "vector", "case": "N1024"}
    row |= {"dtype": "float32", "pass": "forward", "impl": impl, "impl_version": "1"}
    row |= {"block": number, "order": 0, "bytes_read": 8_000_000_000, "flops": 10**9}
    row |= {"bytes_written": 4_000_000_000, "device_us": time, "status": "ok", "reason": ""}
    return row | other


def write_table(folder: Path) -> Path:
    """Make a folder with a table of one tuned key, for the GPU of the runs written here."""
    rule, rival = "BLOCK=64 num_warps=4", "BLOCK=64 num_warps=8"
    entry = {"key": {"n": 64}, "config": {"BLOCK": 64, "num_warps": 4}, "us": 2.0, "rule": rule}
    entry["runner_up"] = {"config": rival, "us": 2.2, "gap": 0.1, "tie": False}
    entry["timed"] = {rule: 2.0, rival: 2.2}
    kernels = {"_elementwise_kernel": {"source_sha256": "3" * 64, "keys": [entry]}}
    family = {"run_id": RUN_ID, "triton": "3.6.0", "kernels": kernels}
    device = environment()["gpu"]["name"]
    write_json(folder / "gpu.json", {"device": device, "families": {"vector": family}})
    return folder


def write_run(folder: Path, ops=tuple(FAMILIES), mode="measured", recorded=None) -> Path:
    """Make a run of `ops` in `folder`; a replayed one has its GPU reports in `recorded`."""
    here = (
        environment() if mode == "measured" else environment("20000102T0000Z-1111111-nogpu", False)
    )
    write_json(folder / "environment.json", here)
    for op in ops:
        _measurement(folder, op, mode)
        impls = ["ours", *_rivals(op)]
        for impl in impls:
            if mode == "measured":
                _report(folder, op, impl, "gpu")
            else:
                _report(folder, op, impl, "interpreter" if impl == "ours" else "cpu")
                _report(recorded, op, impl, "gpu")
    for family in dict.fromkeys(FAMILIES[op] for op in ops):
        _build(folder, family)
    _survey(folder)
    if mode == "replayed":
        for op in ops:
            _measurement(recorded, op, "measured")
        manifest.seal(recorded)
    return folder


def _measurement(folder: Path, op: str, mode: str) -> None:
    write_raw(folder, op, [row for cell in _cells(op) for row in _rows(op, *cell)], mode)


def write_raw(
    folder: Path,
    op: str,
    rows: list[dict],
    mode="measured",
    gpu="Synthetic GPU",
    board="GPU-00000000",
    **more,
):
    """Write `raw/<op>.csv` from these rows, by column, and its sidecar, which has `more`."""
    path = folder / "raw" / f"{op}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        given = set(HEADER.split(",")).union(*rows)
        header = [name for name in raw.HEADER if name in given]
        writer = csv.DictWriter(file, header, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    taken = environment()
    taken["gpu"] |= {"name": gpu, "uuid": board}
    sidecar = {key: taken[key] for key in ("run_id", "date", "commit", "dirty")} | {
        "op": op,
        "mode": mode,
        "rows": len(rows),
        "csv_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "environment": taken,
        "environment_sha256": hashlib.sha256(
            json.dumps(taken, sort_keys=True).encode()
        ).hexdigest(),
        "ceilings": [
            {"quantity": name, "unit": unit, "value": value, "sm_mhz": 1755, "source": "measured"}
            for name, (unit, value) in CEILINGS.items()
        ],
        "overhead": {"total_s": 100.0, "timed_s": 70.0, "first_s": 10.0, "share": 0.2},
        "schedule": {"cores": 16},
        "autotuned": {"a_library": {"date": taken["date"], "gpu": "GPU-0"}},
    }
    write_json(path.with_suffix(".json"), sidecar | more)


def _cells(op: str):
    """(case, dtype, pass, bytes read, bytes written, FLOPs) of each cell."""
    for dtype, size in DTYPES.items():
        if FAMILIES[op] == "vector":
            for n in (2**p for p in range(16, 29, 2)):
                read = n * size * (1 if op == "scale" else 2)
                yield f"N{n}", dtype, "forward", read, size if op == "dot" else n * size, n
        elif op in ("softmax", "layer_norm", "rms_norm"):
            shapes = [(4096, 2**p) for p in range(8, 15)] + [(32768, 4096), (4096, 65536)]
            for m, n in shapes:
                tile = m * n * size
                yield f"M{m}-N{n}", dtype, "forward", tile, tile, 5 * m * n
                yield f"M{m}-N{n}", dtype, "backward", 2 * tile, tile, 8 * m * n
        elif op == "swiglu":
            for m, n in ((4096, 1024), (8192, 11008), (8192, 14336)):
                tile = m * n * size
                yield f"M{m}-N{n}", dtype, "forward", 2 * tile, tile, 10 * m * n
                yield f"M{m}-N{n}", dtype, "backward", 3 * tile, 2 * tile, 20 * m * n
                yield f"M{m}-N{n}", dtype, "both", 5 * tile, 3 * tile, 30 * m * n
        elif op == "rotary":
            for s in (1024, 4096, 16384):
                tile = s * 40 * 128 * size
                for pass_ in ("forward", "backward"):
                    yield f"B1-S{s}-H32-K8-D128-R64", dtype, pass_, tile, tile, 3 * tile // size
        elif op == "matmul":
            shapes = [(n, n, n, "") for n in (512, 1024, 2048, 4096, 8192)]
            shapes += [(8192, 4096, 14336, "")]
            shapes += [
                (4096, 4096, 4096, f"-{f}")
                for f in ("bias", "relu", "leaky_relu", "gelu-bias", "nt")
            ]
            for m, n, k, flags in shapes:
                work = 2 * m * n * k
                name = f"M{m}-N{n}-K{k}{flags}"
                yield name, dtype, "forward", (m * k + k * n) * size, m * n * size, work
        elif dtype != "float32":
            for d in (64, 128):
                for s in (512, 1024, 2048, 4096, 8192, 16384):
                    for flag, share in (("", 4), ("-causal", 2)):
                        b, h = 16384 // s, 2048 // d
                        tile = b * h * s * d * size
                        name = f"B{b}-H{h}-S{s}-D{d}{flag}"
                        yield name, dtype, "forward", 3 * tile, tile, share * b * h * s * s * d


def rows_of(op: str, seed: int) -> list[dict]:
    """Return the rows of one op as another run might have them: other noise, equal speed."""
    return [row for cell in _cells(op) for row in _rows(op, *cell, seed=seed)]


def _rows(op, case, dtype, pass_, read, written, flops, seed=0):
    _, read_rate = CEILINGS["read"]
    _, write_rate = CEILINGS["write"]
    memory = read / read_rate + written / write_rate
    floor = max(memory / 1e3, flops / CEILINGS[dtype][1] / 1e6)
    place = zlib.crc32(f"{op} {case} {dtype} {pass_}".encode())
    rng = np.random.default_rng(place + seed)
    drift = np.exp(rng.normal(0, 0.01, BLOCKS))
    for impl in ["ours", "ours_twin", *_rivals(op)]:
        row = {name: "" for name in HEADER.split(",")} | {
            "op": op,
            "family": FAMILIES[op],
            "case": case,
            "dtype": dtype,
            "pass": pass_,
            "impl": impl,
            "impl_version": "3.6.0" if impl.startswith("ours") else "2.11.0",
            "bytes_read": int(read),
            "bytes_written": written,
            "flops": flops,
        }
        if reason := _hole(op, case, impl):
            yield row | {"block": 0, "order": 0, "status": reason[0], "reason": reason[1]}
            continue
        time = 3.0 + floor / _efficiency(op, impl, pass_)
        # Two processes run each implementation of the shortest calls of one op.
        processes = range(2) if op == "scale" and case == "N65536" else range(1)
        for block, process in itertools.product(range(BLOCKS), processes):
            device = time * drift[block] * np.exp(rng.normal(0, 0.003))
            yield row | {
                **({"process": process} if op == "scale" else {}),
                "block": block,
                "order": int(rng.integers(0, 5)),
                "device_us": f"{device:.4f}",
                "call_us": f"{device + 12:.4f}",
                "calls": 40,
                "peak_mem_bytes": read + written,
                "sm_mhz": 1980,
                "temp_c": 45,
                "power_w": 500,
                "energy_uj": f"{500 * device:.1f}" if block == BLOCKS - 1 else "",
                "energy_pm_uj": f"{10 * device:.1f}" if block == BLOCKS - 1 else "",
                "throttle": 0,
                "status": "ok",
            }


def _efficiency(op: str, impl: str, pass_: str) -> float:
    plain = impl.removesuffix("_twin")
    share = zlib.crc32(f"{op} {plain} {pass_}".encode()) % 1000 / 1000
    return 0.85 + 0.1 * share if plain == "ours" else 0.35 + 0.6 * share


def _hole(op: str, case: str, impl: str) -> tuple[str, str] | None:
    if impl == "sdpa_flash" and "S512" in case:
        return "unsupported", "No available kernel: invented reason with a_name & 100 % of #s"
    if impl == "torch_eager" and op == "softmax" and "N65536" in case:
        return "oom", "out of memory: tried 8.00 GiB"
    if impl == "sdpa_efficient" and "S16384" in case:
        return "hung", "no answer within 60 s"
    return None


def _rivals(op: str) -> tuple[str, ...]:
    return ("torch_compile", "torch_eager", *(ATTENTION if op == "attention" else ()))


def _report(folder: Path, op: str, impl: str, mode: str) -> None:
    dtypes = ("float32", "float16") if mode == "interpreter" else tuple(DTYPES)
    rng = np.random.default_rng(zlib.crc32(f"{op} {impl} {mode}".encode()))
    found = []
    for dtype in dtypes:
        for number, values in enumerate(("", "", "large", "")):
            ratio = round(float(rng.uniform(0.1, 0.9)), 3)
            tensor = {"name": "out", "max_err": 1e-3, "rms_err": 1e-4, "eager_max_err": 1e-3}
            tensor |= {"eager_rms_err": 1e-4, "bound_max": 2e-3, "bound_rms": 2e-4, "ratio": ratio}
            found.append(
                {
                    "case": "-".join(filter(None, (f"M{number + 1}-N127", values))),
                    "dtype": dtype,
                    "pass": "forward",
                    "kind": "edge",
                    "hostile": values != "",
                    "status": "ok",
                    "reason": "",
                    "tensors": [tensor],
                    "deterministic": number != 3,
                }
            )
    if impl == "sdpa_flash":
        found[-1] |= {"status": "unsupported", "reason": "No available kernel", "tensors": []}
    if impl == "sdpa_cudnn":
        found[-1] |= {"status": "unreached", "reason": "time limit of 5 s", "tensors": []}
        odd = [cell for cell in found if cell["hostile"]][-1]
        odd |= {"status": "inaccurate", "reason": "out is far from the oracle"}
    former = (op, impl) == ("rotary", "torch_compile")
    if former:
        found[0] |= {"status": "inaccurate", "reason": MISCOUNT, "tensors": []}
    report = {
        "op": op,
        "impl": impl,
        "impl_version": "3.6.0" if impl == "ours" else "2.11.0",
        "code_sha256": f"of {op} {impl}",
        "mode": mode,
        "device": "Synthetic GPU" if mode == "gpu" else "Synthetic CPU",
        "seed": 1,
        "guard": int(not former),
        "status": "ok",
        "reason": "",
        "cells": found,
        "ledger": [_seen(op, dtype, mode == "gpu") | _told(op, impl) for dtype in dtypes],
    }
    write_json(folder / "verify" / op / f"{impl}.json", report)


def _told(op: str, impl: str) -> dict:
    """The words of a baseline's file on its calls: of one op it has both to say."""
    if (op, impl) != ("softmax", "torch_compile"):
        return {"settings": "", "wide": ""}
    text = "in bfloat16 its default chunk_size of 4096 is halved; the default call raises (operand"
    return {"settings": f"{text} 'v': m == n makes row/col inference ambiguous)", "wide": "mask"}


def _seen(op: str, dtype: str, gpu: bool) -> dict:
    """Return the ledger of one call; matmul has a workspace, and copies an operand."""
    entry = {"case": "M1-N127", "dtype": dtype, "pass": "forward", "status": "ok", "reason": ""}
    entry |= {"accumulates": "float32" if op == "dot" else None, "saved_bytes": None}
    entry |= {"input_bytes": 2**20, "output_bytes": 2**20, "float32_precision": "highest"}
    busy = op == "matmul"
    entry |= {"overwritten_bytes": 2**20 * busy}
    entry |= {"copies": int(busy), "casts": 0, "workspace_bytes": 3 * 2**20 * busy if gpu else None}
    kernels = {"a_kernel<float, 4>": 1 + busy} if gpu else {}
    counts = {"launches": 1 + busy, "memory_ops": int(busy)} if gpu else {}
    return entry | {"kernels": kernels, "launches": None, "memory_ops": None} | counts


def _build(folder: Path, family: str) -> None:
    kernels, stages = [], []
    for end in {"vector": ("_binary", "_dot_partial"), "matmul": ("",)}.get(
        family, ("_fwd", "_bwd")
    ):
        name = f"_{family}{end}_kernel"
        for arch in ("80", "90", "100", "120", "gfx942"):
            for block in (64, 128, 256) if arch == "90" else (128,):
                registers = zlib.crc32(f"{name}{arch}{block}".encode()) % 200 + 32
                kernels.append(
                    {
                        "kernel": name,
                        "arch": arch,
                        "config": f"BLOCK_M={block} BLOCK_N=128 num_warps=8",
                        "default": block == 128,
                        "dtype": "bfloat16",
                        "status": "ok",
                        "reason": "",
                        "registers": registers,
                        "spill_stores": 16 if registers > 220 else 0,
                        "spill_loads": 0,
                        "shared_bytes": block * 512,
                        "fits": True,
                        "warps": 8,
                        "stages": 3,
                        "instructions": {"wgmma": 8 * (family == "matmul"), "ldg128": 4},
                        "sha256": "0" * 64,
                    }
                )
        size = len(name) * 40
        for stage, factor in (("ttir", 3), ("ttgir", 5), ("llir", 14), ("ptx", 12), ("sass", 30)):
            row = {
                "kernel": name,
                "stage": stage,
                "bytes": size * factor,
                "lines": size * factor // 50,
            }
            stages.append(row | {"path": f"{name}.{stage}"})
    built = {"file": family, "triton": "3.6.0", "kernels": kernels, "ir": stages, "tables": []}
    write_json(folder / "build" / f"{family}.json", built)


def _survey(folder: Path) -> None:
    """The survey has one installed library, one from the snapshot, and one without kernels."""
    found = (
        ("ours", "", "softmax", "kernel", "triton", "here"),
        ("torch", "2.11.0", "matmul", "kernel", "template", "installed"),
        ("flash-attn", "2.8.3", "attention", "kernel", "triton", "snapshot"),
        ("flash-attn", "2.8.3", "attention", "function", "cute", "snapshot"),
        ("some_library", "1.0", "other", "function", "gluon", "installed"),
    )
    lines = ["library,version,file,kernel,role,language,lines,autotuned,category,source,date"]
    for library, version, category, role, language, source in found:
        place = f"{library},{version},{library}/a.py,k,{role},{language},12,False"
        lines.append(f"{place},{category},{source},2000-01-01")
    (folder / "survey.csv").write_text("\n".join([*lines, ""]))


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
