"""The fixtures that tests of this room share."""

from tests.support.workflows import finished, finished_once, tree, whole_tree  # noqa: F401
