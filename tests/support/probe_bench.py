"""A worker that answers questions about itself."""

import os
import subprocess
import sys

import torch
import triton


class Bench:
    version = "1.0"

    def __init__(self, op, impl, seed):
        self.seed = seed

    def prepare(self, names):
        rivals = [name for name in names if name in sys.modules]
        return {"cuda": torch.cuda.is_initialized(), "rivals": rivals, "server": os.getppid()}

    def block(self, name):
        interpreted = triton.knobs.runtime.interpret
        kind = type(triton.language.cdiv).__name__
        return {"value": os.environ.get(name), "interpreted": interpreted, "kind": kind}

    def energy(self):
        return {"child": subprocess.Popen(["sleep", "600"]).pid}

    def check(self):
        os.write(1, b"x" * (5 << 20) + b"the end")

    def release(self):
        self.seed = {"long": "y" * (5 << 20)}
        return self.seed
