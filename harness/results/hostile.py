"""Which cells of a report are hostile, as `ops._spec.Case` defines it.

A report from before its cells said so is classified from the names of its cases.
"""

import re
from collections.abc import Mapping

from ops._spec import LAYOUTS, VALUES, Case

SIZE = re.compile(r"([A-Z])(\d+)")


def cell(of: Mapping) -> bool:
    """Whether a cell of a verify report is hostile."""
    return of["hostile"] if "hostile" in of else parsed(of["case"]).hostile


def parsed(name: str) -> Case:
    """The case of this name: `M4-N100-scaled-expanded-large` has all parts that there are."""
    sizes, flags, layout, values = {}, [], "", ""
    for part in name.split("-"):
        if found := SIZE.fullmatch(part):
            sizes[found[1]] = int(found[2])
        elif part in VALUES:
            values = part
        elif part in LAYOUTS:
            layout = part
        else:
            flags.append(part)
    return Case(sizes, tuple(flags), layout, values)
