"""How long tests wait for what must happen: so long that a busy machine decides none of them."""

import time

PATIENCE_S = 300.0


def wait_until(condition):
    """Returns when condition() holds; fails where it does not within PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
