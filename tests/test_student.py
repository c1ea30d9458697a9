"""Student's t against known values, made once with scipy.stats.t of SciPy 1.17.1."""

import itertools
import math

import numpy as np
import pytest

from harness import student

TAILS = [
    (0.01, 1.0, 0.496817007235093),
    (0.5, 1.5, 0.34028355533497),
    (1.0, 2.0, 0.2113248654051871),
    (2.0, 4.5, 0.054128953590562495),
    (2.262157, 9.0, 0.025000006652215814),
    (4.0, 9.0, 0.0015552141551929272),
    (5.9, 6.3, 0.0004416589543373377),
    (20.0, 9.0, 4.539760649958273e-09),
    (3.0, 39.0, 0.0023432839701823423),
    (8.0, 12.6, 1.3713204692479887e-06),
    (1.96, 400.0, 0.025344835150013782),
    (6.0, 5000.0, 1.0560481416526974e-09),
    (100.0, 3.0, 1.1022609615924553e-06),
]
QUANTILES = [
    (1.0, 12.706204736174705),
    (2.5, 3.5746548420036834),
    (9.0, 2.2621571627982053),
    (40.0, 2.0210753903062733),
    (1000.0, 1.9623390808264085),
]


@pytest.mark.parametrize(("t", "freedom", "expected"), TAILS)
def test_the_tail_is_the_known_one(t, freedom, expected):
    assert float(student.tail(t, freedom)) == pytest.approx(expected, rel=1e-8)
    assert float(student.tail(-t, freedom)) == pytest.approx(1 - expected, rel=1e-8)


def test_the_ends_of_the_tail():
    assert student.tail(np.inf, 3.0) == 0
    assert student.tail(-np.inf, 3.0) == 1
    assert student.tail(0.0, 3.0) == pytest.approx(0.5)
    assert student.tail(1e200, 30.0) == pytest.approx(0)


@pytest.mark.parametrize(("freedom", "expected"), QUANTILES)
def test_the_quantile_is_the_known_one(freedom, expected):
    assert float(student.quantile(0.95, freedom)) == pytest.approx(expected, rel=1e-8)


def test_arrays_broadcast():
    t, freedom = np.linspace(-3, 3, 7), np.array([[2.0], [9.0]])
    found = student.tail(t, freedom)
    assert found.shape == (2, 7)
    np.testing.assert_allclose(found + found[:, ::-1], 1)
    assert student.quantile(0.95, freedom).shape == (2, 1)


def test_one_value_is_computed_as_among_others():
    for a, b, x in itertools.product(
        (0.5, 2.0, 2.37, 40.0, 1e6), (0.5, 3.2), (0.0, 1e-300, 1e-3, 0.4, 0.99, math.nan)
    ):
        pair = [np.array([value, value]) for value in (a, b, x)]
        single = [np.array(value) for value in (a, b, x)]
        found, expected = student._fraction(*single), student._fraction(*pair)
        assert found.tobytes() == expected[:1].tobytes() and found.shape == ()
