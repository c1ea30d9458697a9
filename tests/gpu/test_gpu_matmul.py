"""Check products with copies of operands and with parts of K on a GPU, against float64."""

import itertools

import pytest
import torch

from kernels.matmul import matmul
from kernels.matmul_details.cost import parts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs the tensor cores of Hopper",
    ),
]
# The multiprocessors of an H100 and of an H200.
SMS = 132


@pytest.mark.parametrize("turned", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize(
    ("sizes", "parts"),
    [((2101, 2647, 1489), 1), ((512, 2048, 16384), 2), ((786, 1426, 10762), 3)],
)
def test_odd_sizes_and_a_long_k_are_right_and_repeat(sizes, parts, turned):
    (m, n, k), device = sizes, "cuda"
    assert parts_of(m, n, k, SMS) == parts
    generator = torch.Generator(device).manual_seed(sum(sizes))

    def drawn(*shape, turned=False):
        shape = shape[::-1] if turned else shape
        x = torch.randn(shape, generator=generator, device=device).bfloat16()
        return x.T if turned else x

    a, b = drawn(m, k, turned=turned[0]), drawn(k, n, turned=turned[1])
    bias, residual = drawn(n), drawn(m, n)
    found, again = (matmul(a, b, bias, "gelu", residual=residual) for _ in range(2))
    truth = torch.nn.functional.gelu(a.double() @ b.double() + bias) + residual
    assert torch.equal(found, again)
    assert (found.double() - truth).norm() <= 4e-3 * truth.norm()
