"""Check each form of the Hopper product on the GPU, in a process with a time limit of its own.

The tests are independent, so `-n 8` runs eight of them beside each other.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.product_forms import FLOAT8_FORMS, FORMS, SCALES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs the tensor cores of Hopper",
    ),
]
ROOT = Path(__file__).parents[2]
# For the start of Python, the compilation of the kernel and its run, in seconds.
LIMIT = 120


def succeeds(*case):
    command = [sys.executable, "-m", "tests.support.product_on_gpu", json.dumps(case)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_form_is_that_of_float64_and_twice_the_same(form):
    index = FORMS.index(form)
    # Several tiles a program, a last one that is not full, and K shorter than the ring or longer.
    sizes = [(2100, 2648, 488), (2100, 2648, 64)][index % 2]
    succeeds(form, sizes, (bool(index % 2), bool(index // 2 % 2)), "bfloat16")


@pytest.mark.parametrize("scales", SCALES[:2], ids=str)
@pytest.mark.parametrize("form", FLOAT8_FORMS, ids=str)
def test_a_form_of_float8_is_that_of_float64_and_twice_the_same(form, scales):
    succeeds(form, (2100, 2648, 1040), (False, True), "float8_e4m3fn", scales)
