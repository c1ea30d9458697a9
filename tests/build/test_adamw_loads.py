"""Check in the binaries for Hopper that the update of AdamW reads wide, early and at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Loads of 16 bytes a thread in a round: parameter, gradient and both moments, each twice if they
# are float32. Masters take the place of parameters, and a gradient then has 8 bytes.
LOADS = {"bfloat16": 4, "float32": 8, "bfloat16 masters": 3}


def test_all_loads_of_a_round_are_in_flight_together():
    # That process interprets no kernel.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.adamw_build"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout)
    assert found == {
        name: {"vector_loads": n, "early": n, "barriers": 0, "shared": 0, "spills": 0}
        for name, n in LOADS.items()
    }
