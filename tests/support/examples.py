"""How many random examples each op is tried at, in the interpreter or, with a GPU, on it."""

from hypothesis import settings

many = settings(max_examples=200, deadline=None, derandomize=True)
