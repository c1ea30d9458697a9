"""PyTorch: randint over a range near 2^63 is not uniform.

The range has 0.375 * 2^64 numbers. 64 random bits modulo the range give the first two thirds of it
three times for each two times of the last third. The same was mended for ranges near 2^32:
https://github.com/pytorch/pytorch/issues/148175.

Exit code: 1 reproduced, 0 not reproduced. `--check` says only that it can run here.
"""

import platform
import sys

import torch

DRAWS, RANGE = 300_000, 3 * 2**61


def case():
    drawn = torch.randint(0, RANGE, (DRAWS,), generator=torch.Generator().manual_seed(0))
    thirds = (drawn // (RANGE // 3)).bincount(minlength=3) / DRAWS
    # The deviation of a share of a third in so many draws is below 0.001.
    uneven = (thirds - 1 / 3).abs().max().item() > 0.01
    return "0.333 0.333 0.333", " ".join(f"{share:.3f}" for share in thirds.tolist()), uneven


def main():
    print(f"python {platform.python_version()}, torch {torch.__version__}")
    if "--check" in sys.argv[1:]:
        print("can run here")
        return 0
    expected, observed, reproduced = case()
    print(f"expected: {expected}\nobserved: {observed}")
    print("reproduced" if reproduced else "not reproduced")
    return int(reproduced)


if __name__ == "__main__":
    sys.exit(main())
