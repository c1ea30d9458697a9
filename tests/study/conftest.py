"""The fixtures that tests of this room share."""

from tests.support.fake_nvml import driver  # noqa: F401
