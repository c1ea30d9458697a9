"""What the figures share: colours, and what is drawn."""

import runpy
from pathlib import Path

import pandas as pd

FIGURE = runpy.run_path(
    str(Path(__file__).resolve().parents[1] / "paper" / "figures" / "_figure.py")
)


def test_an_implementation_keeps_its_colour_in_a_run():
    names = ["torch_eager", "torch_compile", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "ours"]
    found = FIGURE["looks"](names)
    assert found == FIGURE["looks"](reversed(names))
    assert len({look["color"] for look in found.values()}) == len(names)
    many = FIGURE["looks"]([f"library_{i}" for i in range(12)])
    assert len({look["color"] for look in many.values()}) == 12
    more = FIGURE["looks"]([f"library_{i}" for i in range(24)])
    assert len({(look["color"], "markerfacecolor" in look) for look in more.values()}) == 24


def test_a_pass_that_nobody_offers_is_not_drawn():
    rows = pd.DataFrame(
        [
            ("transpose", "forward", "ok"),
            ("transpose", "backward", "unsupported"),
            ("transpose", "backward", "unsupported"),
            ("dot", "backward", "unsupported"),
            ("dot", "backward", "crashed"),
        ],
        columns=["op", "pass", "status"],
    )
    assert FIGURE["_offered"](rows).index.tolist() == [0, 3, 4]
    assert FIGURE["_offered"](rows[:0]).empty
