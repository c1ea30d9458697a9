"""Check that no rule and no table knows the sweep: a launch depends on its call's shape alone."""

import inspect
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.build import recorder
from harness.project import source_tree
from kernels._runtime import configs as _tuned

ROOT = Path(__file__).parents[2]
# The rules use these sizes as numbers; other arguments have few values.
LENGTH = 64

# Print the launches of fixed shapes under several sweeps; kernels are compiled in this process.
CHOICES = """
import json, random
from pathlib import Path
from harness.build import recorder
from harness.project import registry, source_tree
from kernels._runtime import device
from kernels._runtime.configs import Configs

LIMITS = {"sm_count": 132, "shared_bytes": 232448, "hip": False}
FAMILIES = source_tree.ops(Path())
OPS = {name: registry.op(name)[0] for name in FAMILIES}
SWEEPS = {name: op.sweep for name, op in OPS.items()}


def drawn(op, seed, count=3):
    generator = random.Random(seed)
    return tuple(op.drawn(generator) for _ in range(count))


PROBES = {name: (*drawn(op, 11), op.sweep[0], op.sweep[-1]) for name, op in OPS.items()}


def choices(sweeps):
    for name, op in OPS.items():
        object.__setattr__(op, "sweep", sweeps[name])
    for stem in set(FAMILIES.values()):
        for configs in recorder.declared(stem):
            configs._known.clear()
    found = []
    with device.assume_device(**LIMITS):
        for name, op in OPS.items():
            for case in PROBES[name]:
                dtype = "bfloat16" if "bfloat16" in op.dtypes else op.dtypes[0]
                for each in recorder.launched(op, case, dtype):
                    found.append([name, case.name, each.name, each.config, repr(each.grid)])
    return found


found = {
    "declared": choices(SWEEPS),
    "reversed": choices({name: sweep[::-1] for name, sweep in SWEEPS.items()}),
    "others": choices({name: drawn(op, 12, 5) for name, op in OPS.items()}),
    "none": choices(dict.fromkeys(OPS, ())),
}
[tiles] = [c for c in recorder.declared("vector") if c.name == "_forward_kernel"]
rule = tiles.choose
cheat = lambda **key: rule(**key) | {"num_warps": 8 if OPS["scale"].sweep else 4}
object.__setattr__(tiles, "choose", cheat)
found["cheat"] = choices(SWEEPS)
found["cheat, none"] = choices(dict.fromkeys(OPS, ()))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def chosen():
    call = [sys.executable, "-c", CHOICES]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("sweep", ["reversed", "others", "none"])
def test_another_sweep_changes_no_choice(chosen, sweep):
    assert {line[0] for line in chosen["declared"]} == set(source_tree.ops(ROOT))
    assert chosen[sweep] == chosen["declared"]


@pytest.mark.slow
def test_a_rule_that_asks_for_the_sweep_is_seen(chosen):
    assert chosen["cheat"] != chosen["cheat, none"]


def entries():
    for path in sorted((ROOT / "kernels/tuned").glob("*.json")):
        for stem, record in json.loads(path.read_text())["families"].items():
            for configs in recorder.declared(stem):
                tuned = record["kernels"].get(configs.name, {}).get("keys", ())
                yield configs, {tuple(e["key"].items()): e["config"] for e in tuned}


def outcome(choose, key):
    """Return the configuration of a key, or the error: some rules take certain row lengths only."""
    try:
        return choose(**key)
    except ValueError as error:
        return str(error)


def test_a_table_binds_its_keys_and_leaves_all_others_to_the_rule(monkeypatch):
    device, beside = torch.device("cuda", 0), 0
    for configs, table in entries():
        monkeypatch.setattr(_tuned, "table_of", lambda *_, table=table: table)
        configs._known.clear()
        configs._tables.clear()
        for known, config in table.items():
            key = dict(known)
            assert configs.pick(device, **key) == config
            for name, value in key.items():
                if type(value) is int and value > LENGTH and name != "shared":
                    other = key | {name: value + 1}
                    if tuple(other.items()) not in table:
                        beside += 1
                        taken = partial(configs.pick, device)
                        assert outcome(taken, other) == outcome(configs.choose, other)
        configs._known.clear()
        configs._tables.clear()
    assert beside > 20


def test_a_rule_that_leaves_candidates_out_takes_the_key_of_the_choice():
    """The tuner gives both the same key."""
    stems = set(source_tree.ops(ROOT).values())
    for configs in (each for stem in stems for each in recorder.declared(stem)):
        wanted = inspect.signature(configs.choose).parameters.values()
        key = [each.name for each in wanted if each.default is each.empty]
        inspect.signature(configs.suits).bind(configs.candidates[0], **dict.fromkeys(key))


def test_every_configuration_is_listed_by_the_kernel_file_whose_table_binds_it():
    """One that no kernel file lists is never tuned, and under another name no table binds."""
    stems = set(source_tree.ops(ROOT).values())
    listed = {id(each) for stem in stems for each in recorder.declared(stem)}
    rooms = [vars(sys.modules[name]) for name in sorted(sys.modules) if name.startswith("kernels.")]
    found = {
        id(each): (each.module, each.name, each.family)
        for room in rooms
        for each in room.values()
        if isinstance(each, _tuned.Configs)
    }
    assert len(found) > 40
    assert [about for about in found.values() if about[2] not in stems] == []
    assert [about for place, about in found.items() if place not in listed] == []
