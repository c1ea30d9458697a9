"""The fixtures that tests of this room share."""

from tests.support.cpu_worker import make  # noqa: F401
from tests.support.fake_nvml import driver  # noqa: F401
from tests.support.verifying import tree  # noqa: F401
