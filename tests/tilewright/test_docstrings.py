"""The docstrings of the public functions: their sections, and examples that hold."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

from harness.machine import nvml
from harness.project import source_tree

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if nvml.gpus() else "cpu"
FUNCTIONS = {
    name: getattr(importlib.import_module(f"kernels.{family}"), name)
    for name, family in source_tree.ops(ROOT).items()
}
SECTIONS = ("Args", "Returns", "Raises", "Source", "Example")
each = pytest.mark.parametrize("name", FUNCTIONS)


def sections(name):
    """The sections of a docstring in Google style: their text by heading."""
    text = inspect.getdoc(FUNCTIONS[name])
    parts = re.split(r"^(\w+):\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@each
def test_a_docstring_has_the_sections_of_the_style(name):
    found = sections(name)
    assert tuple(heading for heading in found if heading in SECTIONS) == SECTIONS
    described = re.findall(r"^    (\w+):", found["Args"], flags=re.MULTILINE)
    assert described == list(inspect.signature(FUNCTIONS[name]).parameters)
    raised = re.findall(r"^    (\w+):", found["Raises"], flags=re.MULTILINE)
    assert {"TypeError", "ValueError"} <= set(raised)


@each
def test_an_example_holds(name):
    """On the CPU the interpreter runs it, with tensors there."""
    example = sections(name)["Example"].replace('device="cuda"', f'device="{DEVICE}"')
    names = {"torch": torch, name: FUNCTIONS[name]}
    test = doctest.DocTestParser().get_doctest(example, names, name, None, None)
    assert test.examples, "no line begins with >>>"
    output = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=output.append)
    assert not failed, "".join(output)
