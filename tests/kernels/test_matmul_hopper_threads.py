"""Run each form of the Hopper product on threads against float64, by way of the public function."""

import itertools
from unittest import mock

import pytest

from kernels import matmul
from kernels._runtime.call_cache import uncached
from kernels._runtime.device import assume_device
from kernels.matmul_details import hopper
from tests.support.product_forms import FLOAT8, FLOAT8_FORMS, FORMS, SCALES, called, compare
from tests.support.product_threads import product_on_threads

# Tiles small enough for threads; the ring and the slots of the parts that leave are as on a GPU.
CONFIGS = [
    hopper._config(8, 256, 16, 8, 4, 2),
    hopper._config(8, 128, 16, 2, 3, 2),
    hopper._config(16, 64, 32, 8, 4, 1),
    hopper._config(8, 256, 16, 8, 3, 4),
]


def on_threads(config, programs, *form, **broken):
    with (
        mock.patch.object(hopper, "is_hopper", lambda device: True),
        mock.patch.object(matmul, "hopper_ends_first", lambda **_: True),
        mock.patch.object(hopper.Configs, "pick", lambda *_, **__: config),
        mock.patch.object(matmul, "FEW_ROWS", 0), assume_device(sm_count=programs),
        product_on_threads(**broken) as launches, uncached(),
    ):  # fmt: skip
        found = called(*form)
    assert launches == [1]
    return found


@pytest.mark.no_gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_each_form_is_that_of_float64(form):
    index = FORMS.index(form)
    # Few tiles a program and many, one step of K and more than the ring has slots, all layouts.
    config, programs = CONFIGS[index % len(CONFIGS)], (2, 20)[index // 4 % 2]
    k, turned = (8, 88, 40)[index % 3], (bool(index % 2), bool(index // 2 % 2))
    compare(*on_threads(config, programs, *form, (13, 200, k), turned))


@pytest.mark.no_gpu
@pytest.mark.parametrize("scale", [0.5, 1.0])
@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("form", FLOAT8_FORMS, ids=str)
def test_each_form_of_float8_is_that_of_float64(form, scales, scale):
    config = CONFIGS[FLOAT8_FORMS.index(form) % len(CONFIGS)]
    config = {**config, "BLOCK_K": 2 * config["BLOCK_K"]}
    compare(*on_threads(config, 2, *form, (13, 200, 80), (False, True), FLOAT8, scales, scale))


@pytest.mark.no_gpu
@pytest.mark.parametrize("turned", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize(("k", "parts"), [(88, 3), (88, 2), (40, 5), (16, 3)])
def test_a_sum_of_parts_of_k_is_that_of_float64(k, parts, turned):
    """Also if the last part has fewer steps than the others, or none."""
    index = (k + parts + turned[0]) % len(CONFIGS)
    form = ("same", False, True, False, False, (13, 200, k), turned)
    with (
        mock.patch.object(matmul, "is_hopper", lambda device: True),
        mock.patch.object(matmul, "parts_of", lambda *_: parts),
    ):
        compare(*on_threads(CONFIGS[index], (2, 20)[k % 3 % 2], *form))


BROKEN = {
    "a block is overwritten before it has left": lambda run: {"store_wait": lambda left: None},
    "a store before the fence": lambda run: {"fence_async_shared": lambda: None},
}


@pytest.mark.no_gpu
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_form_is_found(what):
    with pytest.raises(AssertionError):
        compare(
            *on_threads(
                CONFIGS[0], 2, "same", False, False, False, False, (13, 200, 40), (False, False),
                broken=BROKEN[what],
            )
        )  # fmt: skip
