"""The random stream of a seed, in PyTorch: the words that ours has to draw.

The stream is that of Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011). The key is the seed, and call c, a counter of 64 bits, gives the words 4c to 4c + 3.
"""

import torch

ROUNDS = 10
# The authors' multipliers and the steps of the key.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def philox_words(seed: int | torch.Tensor, first: int, count: int) -> torch.Tensor:
    """`count` words of the stream from `first` on, int64; on the device of the seed."""
    device = seed.device if isinstance(seed, torch.Tensor) else None
    call = torch.arange(first // 4, -(-(first + count) // 4), device=device)
    zero = torch.zeros_like(call)
    words = (call & WORD, call >> 32 & WORD, zero, zero)
    key = (seed & WORD, seed >> 32 & WORD)
    for _ in range(ROUNDS):
        # Products of 64 bits wrap to the same bits, whatever their sign.
        p0, p1 = (word * factor for word, factor in zip(words[::2], MULTIPLIERS, strict=True))
        high = (p1 >> 32 & WORD) ^ words[1] ^ key[0], (p0 >> 32 & WORD) ^ words[3] ^ key[1]
        words = (high[0], p1 & WORD, high[1], p0 & WORD)
        key = [(half + step) & WORD for half, step in zip(key, STEPS, strict=True)]
    return torch.stack(words, dim=-1).reshape(-1)[first % 4 : first % 4 + count]


def multiply_high(low: torch.Tensor, high: torch.Tensor, factor: int) -> torch.Tensor:
    """The upper 64 bits of (high * 2**32 + low) * factor, of words of 32 bits in int64."""
    factor_low, factor_high = factor & WORD, factor >> 32
    cross, other = high * factor_low, low * factor_high
    carry = (low * factor_low >> 32 & WORD) + (cross & WORD) + (other & WORD)
    return high * factor_high + (cross >> 32 & WORD) + (other >> 32 & WORD) + (carry >> 32)
