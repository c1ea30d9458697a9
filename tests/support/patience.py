"""The longest waits of the tests: so long that a busy machine decides no test."""

import time

PATIENCE_S = 300.0


def wait_until(condition):
    """Return when condition() holds; fail if it does not within PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
