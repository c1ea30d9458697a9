"""Run one form of the Hopper product on the GPU, against float64; a process of its own may hang.

`python -m tests.support.product_on_gpu FORM`; FORM is JSON: a form of `product_forms.FORMS`, the
sizes, whether a and b are stored by columns, a dtype, and for float8 a pair of
`product_forms.SCALES`.
"""

import json
import sys
from unittest import mock

import torch

from kernels import matmul
from kernels.matmul_details import hopper
from tests.support.product_forms import SCALES, called, compare


def main(form, sizes, turned, dtype, scales=SCALES[0]):
    launched, launch = [], hopper.launch_product

    def noted(*arguments):
        launched.append(1)
        launch(*arguments)

    with (
        mock.patch.object(hopper, "launch_product", noted),
        mock.patch.object(matmul, "hopper_ends_first", lambda **_: True),
        torch.inference_mode(),
    ):
        found, truths = called(*form, sizes, turned, getattr(torch, dtype), scales)
        again, _ = called(*form, sizes, turned, getattr(torch, dtype), scales)
    torch.cuda.synchronize()
    # Hopper adds products of 8 bits in fewer bits than float32 has (DeepSeek-V3, 2024, 3.3.2).
    compare(found, truths, 2e-3 if "float8" in dtype else 1e-3)
    assert launched, "the form took another kernel"
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
