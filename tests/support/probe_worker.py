"""A worker that answers questions about itself."""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
import triton

from harness.workers.messages import Answer, Request


@dataclass(frozen=True)
class Imports(Answer):
    cuda: bool
    rivals: list[str]
    server: int


@dataclass(frozen=True)
class Variable(Answer):
    value: str | None
    interpreted: bool
    kind: str


@dataclass(frozen=True)
class Child(Answer):
    child: int


@dataclass(frozen=True)
class Text(Answer):
    text: str


@dataclass(frozen=True)
class AskImports(Request):
    """Which of these modules are imported, whether CUDA is in use, and by whom it was forked."""

    do: ClassVar[str] = "imports"
    answer: ClassVar[type[Answer]] = Imports
    names: list[str]


@dataclass(frozen=True)
class AskVariable(Request):
    do: ClassVar[str] = "variable"
    answer: ClassVar[type[Answer]] = Variable
    name: str


@dataclass(frozen=True)
class StartChild(Request):
    do: ClassVar[str] = "start"
    answer: ClassVar[type[Answer]] = Child


@dataclass(frozen=True)
class Print(Request):
    do: ClassVar[str] = "print"


@dataclass(frozen=True)
class SayLong(Request):
    do: ClassVar[str] = "say"
    answer: ClassVar[type[Answer]] = Text


class ProbeWorker:
    version = "1.0"
    requests = (AskImports, AskVariable, StartChild, Print, SayLong)

    def __init__(self, op, impl, seed):
        pass

    def imports(self, names):
        rivals = [name for name in names if name in sys.modules]
        return Imports(torch.cuda.is_initialized(), rivals, os.getppid())

    def variable(self, name):
        interpreted = triton.knobs.runtime.interpret
        return Variable(os.environ.get(name), interpreted, type(triton.language.cdiv).__name__)

    def start(self):
        return Child(subprocess.Popen(["sleep", "600"]).pid)

    def print(self):
        os.write(1, b"x" * (5 << 20) + b"the end")

    def say(self):
        return Text("y" * (5 << 20))
