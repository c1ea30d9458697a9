"""Compile the update of AdamW for sm_90 without a GPU; print how its binaries read, as JSON.

`python -m tests.support.adamw_build` runs apart from the tests, in which kernels are interpreted.
"""

import json
import re

from harness.build import compiler, recorder
from harness.project import registry

FLAGS = {"bfloat16": (), "float32": (), "bfloat16 masters": ("masters",)}


def described(dtype, flags):
    """Return the vector loads of the update, those before its first root, and its barriers."""
    op = registry.op("adamw")[0]
    case = next(c for c in op.sweep if set(c.flags) == set(flags) and dtype in op.dtypes_of(c))
    launches = recorder.launched(op, case, dtype)
    (launch,) = (x for x in launches if x.name == "_update_kernel")
    sass = compiler.compile(launch, "90").asm["sass"]
    code = sass[: sass.index("MUFU.SQRT")]
    row = compiler.row(launch, "90")
    return {
        "vector_loads": len(re.findall(r"\bLDG\.E\.128\b", sass)),
        "early": len(re.findall(r"\bLDG\.E\.128\b", code)),
        "barriers": len(re.findall(r"\bBAR\.", sass)),
        "shared": len(re.findall(r"\b(?:LDS|STS)\b", sass)),
        "spills": row["spill_loads"],
    }


if __name__ == "__main__":
    print(json.dumps({n: described(n.split()[0], flags) for n, flags in FLAGS.items()}))
