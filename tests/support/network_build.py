"""Compile for Hopper, without a GPU, what a network launches; print the kernels that fail, as JSON.

`python -m tests.support.network_build PRESET BATCH [LENGTH]` compiles a decoded token, and
with a length a training step. It runs apart from the tests, in which kernels are interpreted.
"""

import json
import sys

import torch

from harness.build import compiler
from harness.build.recorder import Launch, recorded
from kernels._runtime.device import assume_device
from network import stack
from network.cache import Cache
from network.config import undropped
from network.model import Transformer


def launches(preset: str, batch: int, length: int = 0) -> list[Launch]:
    """Return the distinct launches of a token, or with a length of a forward and backward pass."""
    config = undropped(preset)
    with torch.device("meta"):
        model = Transformer(config, stack.load("ours").parts).to(torch.bfloat16)
    with recorded() as calls, assume_device(hopper=True, sm_count=132):
        ids = torch.zeros(batch, length or 1, dtype=torch.int64, device="meta")
        if length:
            model.train()(ids, ids).backward()
        else:
            cache = Cache(config, batch, 64, torch.bfloat16, "meta")
            cache.used = 32
            with torch.no_grad():
                model.eval()(ids, cache=cache)
    every = [Launch(*call[:2], None, None, "bfloat16", grid=call[2]) for call in calls]
    return list({_form(launch): launch for launch in every}.values())


def _form(launch):
    """The kernel, its constants, and the kind of each other argument."""
    kinds = [str(getattr(x, "dtype", type(x))) for x in launch.arguments.values()]
    return launch.name, launch.config, *kinds


def failures(found: list[Launch]) -> dict[str, str]:
    """Return why kernels cannot run on Hopper, by their names and constants."""
    rows = {f"{x.name} {x.config}": compiler.row(x, "90") for x in found}
    bad = {name: row for name, row in rows.items() if row["status"] != "ok" or not row["fits"]}
    return {name: row["reason"] or "takes too much shared memory" for name, row in bad.items()}


if __name__ == "__main__":
    preset, *numbers = sys.argv[1:]
    found = launches(preset, *map(int, numbers))
    print(json.dumps({"kernels": sorted({x.name for x in found}), "failed": failures(found)}))
