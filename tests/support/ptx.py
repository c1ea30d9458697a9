"""Execute the PTX instructions that inline assembly of the kernels uses, on arrays of lanes.

Triton's interpreter knows no inline assembly. This executes the very text that the compiler would
assemble, so a test checks that text and no paraphrase of it. A lane is the state of one thread.
Lanes branch on their own, and those that lag go first. The meanings are those of NVIDIA's PTX ISA.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,{}\[\]]+")
WORD = 0xFFFFFFFF


def execute(
    text: str,
    inputs: Sequence[np.ndarray],
    outputs: int,
    load: Callable[[np.ndarray, np.ndarray, bool], np.ndarray],
    turned: Callable[[np.ndarray], None],
) -> list[np.ndarray]:
    """Return the registers $0 to $(outputs - 1) after `text` has run, uint64 [lanes] each.

    - inputs: the registers that follow, one number for each lane.
    - load: called with addresses [words, lanes], the lanes that ask, and whether the load is
      strong. A strong load (relaxed, acquire or volatile) sees another program's store. Returns
      words of 32 bits.
    - turned: called with the lanes that have branched backwards.
    """
    lanes = len(inputs[0])
    registers = {f"${i}": np.zeros(lanes, np.uint64) for i in range(outputs)}
    for index, values in enumerate(inputs, outputs):
        registers[f"${index}"] = values.astype(np.uint64)
    program, labels = _parsed(text)
    at = np.zeros(lanes, np.int64)
    while (here := at.min()) < len(program):
        active = np.flatnonzero(at == here)
        guard, negated, name, operands = program[here]
        if guard:
            held = _value(registers, guard, active) != negated
            at[active[~held]] += 1
            active = active[held]
        if name == "bra":
            at[active] = labels[operands[0]]
            if active.size and labels[operands[0]] <= here:
                turned(active)
            continue
        _step(registers, name, operands, active, load)
        at[active] += 1
    return [registers[f"${i}"] for i in range(outputs)]


def _parsed(text: str) -> tuple[list, dict[str, int]]:
    """Return guard, negation, instruction and operands of each line, and the label places."""
    program, labels = [], {}
    body = text.strip()
    if body.startswith("{"):
        body = body[1 : body.rindex("}")]
    for statement in body.split(";"):
        statement = statement.strip()
        while found := re.match(r"(\w+):\s*", statement):
            labels[found[1]] = len(program)
            statement = statement[found.end() :]
        if not statement or statement.startswith(".reg"):
            continue
        found = re.match(r"(?:@(!?)(\w+)\s+)?([\w.]+)\s*(.*)", statement)
        operands = OPERAND.findall(found[4])
        program.append((found[2], found[1] == "!", found[3], operands))
    return program, labels


def _value(registers: dict, operand: str, active: np.ndarray) -> np.ndarray:
    if operand in registers:
        return registers[operand][active]
    return np.full(len(active), int(operand, 0) & (2**64 - 1), np.uint64)


def _put(registers: dict, name: str, active: np.ndarray, values: np.ndarray) -> None:
    lanes = len(registers["$0"])
    registers.setdefault(name, np.zeros(lanes, np.uint64))[active] = values


def _signed(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint32).astype(np.int32)


def _step(registers, name: str, operands: list[str], active: np.ndarray, load: Callable) -> None:
    """Execute one instruction for the lanes that are `active`."""
    operation, *kinds = name.split(".")
    target, *sources = operands
    if operation == "ld":
        targets = re.findall(r"[^\s,{}]+", target)
        begin = _value(registers, sources[0].strip("[] "), active)
        strong = bool({"relaxed", "acquire", "volatile"} & set(kinds))
        width = next((int(kind[1:]) for kind in kinds if re.fullmatch(r"v\d", kind)), 1)
        if kinds[-1] not in ("b32", "u32", "s32") or len(targets) != width:
            raise NotImplementedError(f"PTX: {name} {operands}")
        words = np.stack([begin + np.uint64(4 * i) for i in range(width)])
        for each, values in zip(targets, load(words, active, strong), strict=True):
            _put(registers, each, active, values)
        return
    values = [_value(registers, source, active) for source in sources]
    match name:
        case "setp.eq.s32":
            result = _signed(values[0]) == _signed(values[1])
        case "setp.ne.s32":
            result = _signed(values[0]) != _signed(values[1])
        case "mad.lo.u32":
            result = values[0] * values[1] + values[2]
        case "shl.b32":
            result = values[0] << values[1]
        case "shr.u32":
            result = (values[0] & np.uint64(WORD)) >> values[1]
        case "and.b32":
            result = values[0] & values[1]
        case "prmt.b32":
            both = (values[1] << np.uint64(32)) | (values[0] & np.uint64(WORD))
            result = np.zeros_like(both)
            for byte in range(4):
                which = (values[2] >> np.uint64(4 * byte)) & np.uint64(7)
                result |= (both >> (which * np.uint64(8)) & np.uint64(255)) << np.uint64(8 * byte)
        case _:
            raise NotImplementedError(f"PTX: {name}")
    _put(registers, target, active, result.astype(np.uint64) & np.uint64(WORD))
