"""Names of implementations: ours, its twin, and the stem of a file in `baselines/` for any other.

This module imports nothing, so a command that must parse without torch can use it.
"""

OURS = "ours"
# A second worker that runs ours: the difference between the two is the noise.
TWIN = "ours_twin"


def is_ours(impl: str) -> bool:
    """Return whether an implementation runs the kernels of this project."""
    return impl in (OURS, TWIN)
