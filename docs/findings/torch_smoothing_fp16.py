"""PyTorch: cross_entropy with label smoothing is infinite in float16.

Logits are normal numbers; the loss is about 10 and float16 ends at 65504. The smoothing term is
the sum of all log-probabilities of a row, and of all rows, before it is divided.

Exit code: 1 reproduced, 0 not reproduced. `--check` says only that it can run here.
"""

import platform
import sys

import torch
import torch.nn.functional as F

ROWS, CLASSES, SMOOTHING = 3, 33000, 0.1


def case():
    logits = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(0))
    logits, targets = logits.half(), torch.arange(ROWS)
    expected = F.cross_entropy(logits.double(), targets, label_smoothing=SMOOTHING)
    observed = F.cross_entropy(logits, targets, label_smoothing=SMOOTHING)
    return f"{expected:.4f}", f"{observed:.4f}", not observed.isfinite().item()


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
