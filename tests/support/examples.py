"""Set how many random examples each op gets, in the interpreter or on a GPU."""

from hypothesis import settings

many = settings(max_examples=200, deadline=None, derandomize=True)
