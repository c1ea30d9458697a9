"""The fixtures that tests of this room share."""

from tests.support.cpu_worker import make  # noqa: F401
from tests.support.fake_nvml import driver  # noqa: F401
from tests.support.measuring import timed  # noqa: F401
from tests.support.measuring_command import arguments, command, measured  # noqa: F401
