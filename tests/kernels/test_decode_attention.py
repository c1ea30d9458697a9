"""Attention over a cache: lengths, splits, grouped heads, windows, layouts and refusals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import decode_attention as decoding
from kernels._runtime.checks import MOST_ITEMS
from tests.support.attention import oracle
from tests.support.values import DEVICE, few, randn

decode = decoding.decode_attention
BOUND = {torch.float32: 4e-6, torch.float16: 3e-3}


def agrees(q, k, v, lengths=None, window=None, num_splits=None, softcap=None):
    """The result of each sequence is that of its queries over the keys that count."""
    ends = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    options = {"window": window, "num_splits": num_splits, "softcap": softcap}
    out, lse = decode(q, k, v, ends, **options, return_lse=True)
    assert out.is_contiguous() and out.dtype == q.dtype and lse.dtype == torch.float32
    for index in range(len(q)):
        one = slice(index, index + 1)
        size = k.shape[2] if lengths is None else min(k.shape[2], max(0, lengths[index]))
        keys, values = (x[one, :, :size].cpu().double() for x in (k, v))
        # No key before the first is hidden by the window of a row before the last.
        truth, truth_lse = oracle(
            q[one].cpu().double(),
            keys,
            values,
            causal=True,
            window=None if window is None else (window, -1),
            softcap=softcap,
        )
        found, found_lse = out[one].cpu(), lse[one].cpu()
        seen = truth_lse.isfinite()
        assert torch.equal(found_lse.isneginf(), ~seen) and not found[~seen].any()
        assert (found - truth).abs().max().item() <= BOUND[q.dtype] * 4
        if seen.any():
            assert (found_lse - truth_lse)[seen].abs().max().item() <= 1e-5
    return out


def made(b, h, heads, rows, s, d, dtype=torch.float32):
    sizes = ((h, rows), (heads, s), (heads, s))
    return [randn(b, n, size, d, dtype=dtype, seed=i) for i, (n, size) in enumerate(sizes)]


@few
@given(st.data())
def test_random_shapes_lengths_and_splits(data):
    b, heads, s = (data.draw(st.integers(1, most)) for most in (3, 2, 400))
    h = heads * data.draw(st.sampled_from([1, 2, 5]))
    q, k, v = made(
        *(b, h, heads, data.draw(st.integers(1, 5)), s, 8 * data.draw(st.integers(2, 6))),
        dtype=data.draw(st.sampled_from([torch.float32, torch.float16])),
    )
    lengths = st.lists(st.integers(-2, s + 2), min_size=b, max_size=b)
    agrees(
        *(q, k, v),
        data.draw(st.one_of(st.none(), lengths)),
        data.draw(st.one_of(st.none(), st.integers(0, 100))),
        data.draw(st.one_of(st.none(), st.integers(1, 9))),
        data.draw(st.sampled_from([None, 0.7])),
    )


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_more_rows_than_a_tile_holds(rows):
    agrees(*made(1, 24, 1, rows, 150, 16), num_splits=2)


def test_the_cache_of_another_order_needs_no_copy(monkeypatch):
    q, k, v = made(2, 4, 2, 1, 300, 32)
    expected = decode(q, k, v)
    cache = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]

    def copies(*_):
        raise AssertionError("a tensor was copied")

    monkeypatch.setattr(torch.Tensor, "contiguous", copies)
    assert torch.equal(decode(q, *cache), expected)


def test_keys_beyond_the_length_are_not_read():
    q, k, v = made(1, 4, 2, 1, 600, 32)
    expected = decode(q, k[:, :, :100], v[:, :, :100], num_splits=1)
    k[:, :, 256:], v[:, :, 256:] = math.nan, math.nan
    length = torch.tensor([100], device=DEVICE)
    assert torch.equal(decode(q, k, v, length, num_splits=1), expected)
    assert decode(q, k, v, length.int(), num_splits=5).isfinite().all()


def test_the_largest_window_bounds_nothing():
    """Its sums with the positions of many queries would pass 2**31."""
    agrees(*made(1, 1, 1, 4200, 20, 16), [3], MOST_ITEMS)


def test_lengths_may_lie_apart():
    tensors = made(3, 4, 2, 1, 100, 16)
    lengths = torch.tensor([[7, 0], [100, 0], [40, 0]], device=DEVICE)
    expected = agrees(*tensors, [7, 100, 40])
    assert torch.equal(decode(*tensors, lengths[:, 0]), expected)


def test_one_split_writes_what_several_sum_up_to():
    q, k, v = made(1, 8, 2, 1, 900, 64)
    one = agrees(q, k, v, num_splits=1)
    for splits in (2, 7, 40):
        assert (agrees(q, k, v, num_splits=splits) - one).abs().max() <= 1e-6


@pytest.mark.parametrize("programs", [1, 8, 64, 100, 500, 5000])
@pytest.mark.parametrize("s", [1, 100, 1000, 8192, 131072])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("resident", [1, 2, 3])
def test_splits_spread_the_work_and_are_no_more_than_needed(programs, s, d, resident):
    sms = 132
    splits = decoding._splits(programs, s, d, sms, resident)
    many = programs > sms
    at_once = sms * resident if many else sms * min(resident, 2 if d == 64 else 1)

    def share(n):
        waves = -(-n * programs // at_once)
        return n * programs / (waves * at_once)

    most = s // 1024 if many else min(s // 256, resident * sms // programs)
    possible = range(1, max(1, min(decoding.MOST_SPLITS, most)) + 1)
    assert splits in possible
    enough = decoding.NEARLY * max(map(share, possible))
    assert share(splits) >= enough and all(share(n) < enough for n in range(1, splits))


@pytest.mark.parametrize(
    ("programs", "s", "splits"),
    [(8, 131072, 16), (64, 8192, 2), (136, 4096, 1), (256, 8192, 1), (512, 1024, 1)],
)
def test_splits_are_those_that_an_h100_ran_fastest(programs, s, splits):
    """Measured with 132 multiprocessors that hold three programs; see docs/lab/attention.md."""
    assert decoding._splits(programs, s, 128, 132, 3) == splits


@pytest.mark.parametrize(
    ("d", "itemsize", "shared", "count"),
    [(128, 2, 232448, 3), (64, 2, 232448, 4), (128, 2, 166912, 2), (128, 4, 232448, 1)],
)
def test_as_many_programs_are_resident_as_shared_memory_and_registers_hold(
    d, itemsize, shared, count
):
    """For an H100 and D 128, ptxas gives a program 71680 bytes in bfloat16, 118784 in float32."""
    config = decoding._choose(4, d, itemsize, shared)
    assert decoding._resident(config, d, itemsize, shared) == count


def test_the_keys_of_an_empty_batch_and_of_an_empty_cache():
    assert decode(*made(0, 4, 2, 1, 50, 16)).shape == (0, 4, 1, 16)
    assert not agrees(*made(2, 4, 2, 1, 0, 16)).any()


REFUSALS = {
    "k: 3 heads, expected": lambda: decode(*made(1, 4, 3, 1, 9, 16)),
    r"lengths: shape \(3,\), expected \(2,\)": lambda: decode(
        *made(2, 2, 2, 1, 9, 16), torch.ones(3, dtype=torch.int64, device=DEVICE)
    ),
    "softcap: -2.0, expected": lambda: decode(*made(1, 2, 2, 1, 9, 16), softcap=-2.0),
    "num_splits: 0, expected": lambda: decode(*made(1, 2, 2, 1, 9, 16), num_splits=0),
    "window: -1, expected": lambda: decode(*made(1, 2, 2, 1, 9, 16), window=-1),
    "q: requires a gradient": lambda: decode(
        *(x.requires_grad_() for x in made(1, 2, 2, 1, 9, 16))
    ),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refuses(message):
    with pytest.raises(ValueError, match=f"^{message}"):
        REFUSALS[message]()


def test_refuses_lengths_of_another_dtype():
    with pytest.raises(TypeError, match=r"^lengths: torch.float32, expected"):
        decode(*made(1, 2, 2, 1, 9, 16), torch.ones(1, device=DEVICE))
