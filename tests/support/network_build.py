"""Compile for Hopper, without a GPU, what a network launches; print the kernels that fail, as JSON.

`python -m tests.support.network_build CALL PRESET BATCH LENGTH` compiles a `token`, whose cache has
LENGTH others, the `logits` of all tokens, or a `step`. It runs apart from the tests, in which
kernels are interpreted.
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


def launches(call: str, preset: str, batch: int, length: int) -> list[Launch]:
    """Return the distinct launches of a call; those of a step without its update."""
    config = undropped(preset)
    with torch.device("meta"):
        model = Transformer(config, stack.load("ours").parts).to(torch.bfloat16)
    with recorded() as calls, assume_device(hopper=True, sm_count=132):
        shape = batch, 1 if call == "token" else length
        ids = torch.zeros(shape, dtype=torch.int64, device="meta")
        if call == "step":
            model.train()(ids, ids).backward()
        else:
            cache = None
            if call == "token":
                cache = Cache(config, batch, length + 1, torch.bfloat16, "meta")
                cache.used = length
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
    # Launches of one name and configuration may differ in their arguments.
    rows = [(f"{x.name} {x.config}", compiler.row(x, "90")) for x in found]
    bad = {name: row for name, row in rows if row["status"] != "ok" or not row["fits"]}
    return {name: row["reason"] or "takes too much shared memory" for name, row in bad.items()}


if __name__ == "__main__":
    call, preset, *numbers = sys.argv[1:]
    found = launches(call, preset, *map(int, numbers))
    print(json.dumps({"kernels": sorted({x.name for x in found}), "failed": failures(found)}))
