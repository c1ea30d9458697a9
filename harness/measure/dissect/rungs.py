"""The forms of a kernel from the simplest to the one that is shipped, as data.

A rung forces a form: configurations by kernel, in place of the rule and of tables, and conditions
that a launcher asks and that shall not hold. Each adds one technique to the rung before it, unless
it says "in its place". The clock says what each is worth (`ladders.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Config = Mapping[str, int]


@dataclass(frozen=True)
class Rung:
    """A form of a kernel.

    - adds: the technique, in words for the paper.
    - kernel: the function that must be launched; "" for the form as it is shipped.
    - configs: the configuration of each kernel that is forced, by its name.
    - without: functions that answer None meanwhile, as `module:name`.
    """

    adds: str
    kernel: str = ""
    configs: Mapping[str, Config] = field(default_factory=dict)
    without: tuple[str, ...] = ()


SHIPPED = Rung("as shipped")


def _product(kernel: str, adds: str, config: Config, *without: str) -> Rung:
    return Rung(adds, kernel, {kernel: config}, without)


def _tile(m: int, n: int, k: int, group: int, **rest: int) -> Config:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group} | rest


_NO_HOPPER = "kernels.matmul_details.hopper:suits"
_POINTERS = (
    _NO_HOPPER,
    "kernels.matmul_details.batches:Operand.describable",
    # An operand without a descriptor would be copied for one.
    "kernels.matmul:with_copies",
)


def _by_pointers(adds: str, group: int, stages: int) -> Rung:
    config = _tile(128, 128, 32, group, num_warps=8, num_stages=stages, SPLITS=1)
    return _product("_pointer_kernel", adds, config, *_POINTERS)


def _by_descriptors(adds: str, columns: int, stages: int) -> Rung:
    config = _tile(128, columns, 64, 8, num_warps=8, num_stages=stages)
    return _product("_descriptor_kernel", adds, config, _NO_HOPPER)


MATMUL = (
    _by_pointers("a program for each tile, one step after the other", 1, 1),
    _by_pointers("loads of later steps under the product", 1, 3),
    _by_pointers("tiles in groups of rows, which share columns in L2", 8, 3),
    _by_descriptors("tensor descriptors, programs that stay for several tiles", 128, 4),
    _by_descriptors("tiles of 128 x 256", 256, 3),
    _product(
        "matmul_hopper_kernel",
        "warps with roles: one group copies, two multiply",
        _tile(128, 256, 64, 8, SLOTS=3, LEAVING_SLOTS=4, num_warps=4),
    ),
    SHIPPED,
)

_PORTABLE_FORWARD = ("kernels.attention_details.forward_hopper:suits",)
_PORTABLE_BACKWARD = ("kernels.attention_details.backward:suits",)


def _rows(m: int, n: int, warps: int, stages: int) -> Config:
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}


def _forward(adds: str, stages: int) -> Rung:
    configs = {"_forward_kernel": _rows(64, 64, 4, stages)}
    return Rung(adds, "_forward_kernel", configs, _PORTABLE_FORWARD)


def _forward_hopper(adds: str, **changes: int) -> Rung:
    plain = {
        "ROWS": 64, "BLOCK_N": 128, "GROUPS": 2, "K_SLOTS": 2, "V_SLOTS": 2, "TURNS": 0,
        "PINNED": 0, "Q_LOADED": 0, "SPLIT": 0, "REGISTERS": 240, "num_warps": 4,
    }  # fmt: skip
    return Rung(adds, "forward_hopper_kernel", {"forward_hopper_kernel": plain | changes})


ATTENTION_FORWARD = (
    _forward("a program for each tile of rows, one step after the other", 1),
    _forward("loads of later keys under the products", 3),
    _forward_hopper("warps with roles: one group copies, two compute"),
    _forward_hopper("the two groups take turns, in its place", TURNS=1),
    _forward_hopper("exponentials held under the next scores, in its place", PINNED=1, Q_LOADED=1),
    _forward_hopper("rings of four tiles, in its place", K_SLOTS=4, V_SLOTS=4),
    _forward_hopper("turns with rings of four tiles, in its place", TURNS=1, K_SLOTS=4, V_SLOTS=4),
    _forward_hopper(
        "three groups, in its place", GROUPS=3, K_SLOTS=4, V_SLOTS=4, SPLIT=1, REGISTERS=160
    ),
    SHIPPED,
)


def _backward(adds: str, stages: int) -> Rung:
    configs = {"_dq_kernel": _rows(128, 64, 8, stages), "_dkdv_kernel": _rows(64, 128, 8, stages)}
    return Rung(adds, "_dkdv_kernel", configs, _PORTABLE_BACKWARD)


def _backward_hopper(adds: str, **changes: int) -> Rung:
    plain = {"BLOCK_M": 64, "SLOTS": 2, "EARLY_M": 0, "DELTA_FIRST": 0, "num_warps": 4}
    config = plain | changes
    return Rung(adds, "backward_hopper_kernel", {"backward_hopper_kernel": config})


ATTENTION_BACKWARD = (
    _backward("each gradient has one owner, one step after the other", 1),
    _backward("loads of later steps under the products", 2),
    _backward_hopper("one kernel, warps with roles, dq added in memory"),
    _backward_hopper("the next tile's m read under the last product", EARLY_M=1),
    _backward_hopper("a ring of three tiles of rows, in its place", SLOTS=3),
    _backward_hopper("tiles of 128 rows, in its place", BLOCK_M=128),
    _backward_hopper("a product for dP that begins at -delta", BLOCK_M=128, DELTA_FIRST=1),
    SHIPPED,
)

LADDERS = {
    ("matmul", "forward"): MATMUL,
    ("attention", "forward"): ATTENTION_FORWARD,
    ("attention", "backward"): ATTENTION_BACKWARD,
}
