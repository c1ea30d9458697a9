"""Declares the columns of every CSV file that the study writes: name, kind, unit and meaning.

This is the one place where a column is named. `harness.results.raw` writes and checks its rows by
it, `harness.summarize` and `harness.survey` take their headers from it, and `docs/formats.py` makes
the tables of docs/formats.md. The summary writes the same declarations to `columns.json` in the
folder of the run: the scripts of the paper read them there, because they import nothing of the
harness. Standard library only: the workflow imports this module where nothing is installed.

A name with a part in angle brackets, `size_<letter>`, stands for several columns.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from harness.status import STATUSES

TEXT, COUNT, NUMBER, FLAG = "text", "count", "number", "flag"
GRID, DRAWN = "grid", "drawn"
PASSES = ("forward", "backward", "both")
WORDS = ("better", "no difference", "undecided", "worse")
PART = re.compile(r"<\w+>")


@dataclass(frozen=True)
class Column:
    """A column of a CSV file.

    - kind: "text"; "count", an integer from 0; "number", finite, from 0 in raw files; "flag", True
      or False.
    - unit: that of a number; "1" for a ratio or a share.
    - values: all that a text may be, if they are few.
    - filled: no row may leave it empty.
    - positive: a number above 0.
    - absent: the value in files of former runs, which lack the column; None if none lacks it.
    """

    name: str
    kind: str
    meaning: str
    unit: str = ""
    values: tuple[str, ...] = ()
    filled: bool = False
    positive: bool = False
    absent: str | int | None = None

    def names(self, header: Iterable[str]) -> list[str]:
        """The columns of a header that this one stands for."""
        pattern = re.compile(r"\w+".join(map(re.escape, PART.split(self.name))))
        return [name for name in header if pattern.fullmatch(name)]


@dataclass(frozen=True)
class Table:
    """A CSV file: its name without the ending, what one row is, and its columns in order."""

    name: str
    row: str
    columns: tuple[Column, ...]

    @property
    def header(self) -> tuple[str, ...]:
        """The names of the columns, those with a part in angle brackets as they are declared."""
        return tuple(column.name for column in self.columns)

    def expanded(self, **names: Iterable[str]) -> list[str]:
        """The header with the columns in the place of each declared name that stands for several.

        names: by the part in angle brackets, what takes its place. Neighbours with the same part
        alternate: `a_lo, a_hi, b_lo, b_hi`.
        """
        found: list[str] = []
        waiting: list[str] = []
        for name, following in zip(self.header, [*self.header[1:], ""], strict=True):
            part = PART.search(name)
            if part is None:
                found.append(name)
                continue
            waiting.append(name)
            then = PART.search(following)
            if then is None or then[0] != part[0]:
                for value in names[part[0][1:-1]]:
                    found += [PART.sub(value, one) for one in waiting]
                waiting = []
        return found


def _text(name: str, meaning: str, values: Iterable[str] = (), **more) -> Column:
    return Column(name, TEXT, meaning, values=tuple(values), **more)


def _count(name: str, meaning: str, unit: str = "", **more) -> Column:
    return Column(name, COUNT, meaning, unit, **more)


def _number(name: str, meaning: str, unit: str, **more) -> Column:
    return Column(name, NUMBER, meaning, unit, **more)


def _flag(name: str, meaning: str) -> Column:
    return Column(name, FLAG, meaning)


# Columns that several files have.
OP = _text("op", "operation: the name of the public function", filled=True)
FAMILY = _text("family", "stem of the kernel file of the operation", filled=True)
CASE = _text("case", "sizes, flags, layout and values of the problem", filled=True)
DTYPE = _text("dtype", "data type of the inputs", filled=True)
PASS = _text("pass", "part of the call that is timed or verified", PASSES, filled=True)
SET = _text(
    "set", "a case of the sweep, or a shape drawn for this run", (GRID, DRAWN), filled=True,
    absent=GRID,
)  # fmt: skip
IMPL = _text("impl", "implementation: `ours`, or the stem of a baseline's file", filled=True)
VERSION = _text("impl_version", "version of its library; of ours that of Triton")
MODE = _text("mode", "how the report was made", ("interpreter", "cpu", "gpu"))
STATUS = _text("status", "status of the cell", STATUSES, filled=True)
REASON = _text("reason", "why the status is not `ok`, or a remark on one that is")
# A part of a remark: calls followed each other for seconds before the clock ran.
SUSTAINED = "after seconds of calls"
READINGS = (
    _number("sm_mhz", "SM clock: the median of readings through the block", "MHz"),
    _number("temp_c", "temperature of the GPU: the highest reading", "°C"),
    _number("power_w", "power of the board: the median of readings", "W"),
    _number(
        "energy_uj",
        "energy of a call by the board's counter, between two of its steps at least three apart, "
        "while calls follow each other on a warm L2 with inputs in rotation",
        "µJ",
    ),
    _number("energy_pm_uj", "half-width of its 95 % interval", "µJ"),
)
ENERGY = READINGS[3:]
FLOPS = _count("flops", "operations that any implementation must do", "FLOP", filled=True)
PEAK = _count("peak_mem_bytes", "peak of the GPU memory that the call allocates", "byte")
PART_OF = _text("part", "part of the study to which the cell belongs", ("headline", "training"))
TIMED_BY = _text("timed_by", "`events` if no CUDA graph could be captured", ("graph", "events"))
BASELINE = _text("baseline", "implementation with which ours is compared")
INTERVAL = (
    _number("ci_lo", "lower bound of the 95 % interval", "as the value"),
    _number("ci_hi", "upper bound of the 95 % interval", "as the value"),
)
NOISE = _number(
    "noise", "noise floor: how far the 95 % interval of the A/A gap reaches from 0", "1"
)
P = _number("p", "p-value before the correction", "1")
P_HOLM = _number("p_holm", "p-value after Holm's correction over the family", "1")
VERDICT = _text("verdict", "ours against the baseline", WORDS)
NOTE = _text("note", "a ratio that calls for a look at whether both do the same work")
FILE = _text("file", "stem of the kernel file")
KERNEL = _text("kernel", "name of the compiled function")
BOARD = _text("board", "UUID of the GPU", absent="")
RUN_ID = _text("run_id", "UTC date and time, short commit and GPU model of the run")
QUANTITY = (
    _text("quantity", "`read`, `write`, `copy`, a data type, `launch` or `memory`"),
    _text("unit", "`GB/s`, `TFLOP/s` or `us`"),
    _number("value", "the rate, or the time of an empty launch", "as `unit` says", positive=True),
)
CEILING = (
    *QUANTITY,
    _count("sm_mhz", "median SM clock seen meanwhile", "MHz"),
    _text("source", "`measured`, or the data sheet"),
)

RAW = Table(
    "raw/<op>",
    "an implementation in a block of a cell, by process",
    (
        *(OP, FAMILY, CASE, DTYPE, PASS, SET, BOARD, IMPL, VERSION),
        _count(
            "process", "number among the processes of the implementation", filled=True, absent=0
        ),
        _count("block", "number of the block in the cell", filled=True),
        _count("order", "place of the implementation in the block", filled=True),
        _number("device_us", "GPU time of a call on a cold L2", "µs", positive=True),
        _number("call_us", "host time of an eager call", "µs", positive=True),
        _count("calls", "calls that the GPU time is the median of"),
        _count("bytes_read", "bytes that any implementation must read", "byte", filled=True),
        _count("bytes_written", "bytes that any implementation must write", "byte", filled=True),
        FLOPS,
        PEAK,
        *READINGS,
        _text("throttle", "every clock event that a reading saw"),
        *(STATUS, REASON),
    ),
)

SUMMARY = Table(
    "summary",
    "an implementation in a cell",
    (
        *(OP, FAMILY, CASE, DTYPE, PASS, IMPL, VERSION),
        _count("size_<letter>", "size of the case by its letter"),
        _text("flags", "parts of the case's name that are no sizes"),
        *(SET, TIMED_BY),
        _count("processes", "processes of this implementation"),
        _count("blocks", "blocks with a time"),
        _count("throttled", "blocks that something slowed"),
        _number("device_us", "GPU time of a call: the median over blocks", "µs"),
        *INTERVAL,
        _number("call_us", "host time of a call: the least of the blocks", "µs"),
        PEAK,
        *ENERGY,
        *(READINGS[2], READINGS[0], READINGS[1]),
        _number("gbps", "bytes of the cost over the GPU time", "GB/s"),
        _number("tflops", "FLOPs of the cost over the GPU time", "TFLOP/s"),
        _number("floor_us", "least time that the ceilings allow", "µs"),
        _text("bound", "what sets the floor", ("memory", "compute")),
        _number("pct_sol", "share of the speed of light: the floor over the GPU time", "%"),
        _number("speedup_vs_<impl>", "time of that implementation over the time of this row", "1"),
        _number("speedup_vs_<impl>_lo", "lower bound of its 95 % interval", "1"),
        _number("speedup_vs_<impl>_hi", "upper bound of its 95 % interval", "1"),
        *(STATUS, REASON, RUN_ID),
    ),
)

VERDICTS = Table(
    "verdicts",
    "a baseline in a cell in which ours has a time",
    (
        *(OP, FAMILY, CASE, DTYPE, PASS, SET, PART_OF, SUMMARY.columns[8]),
        _text("bound", "what sets the floor", ("memory", "compute")),
        _number("mib", "bytes that the cost of the cell moves", "MiB"),
        BASELINE,
        _text("library", "distribution of the baseline"),
        _count("outside", "libraries other than PyTorch and Triton with a time in the operation"),
        _text("timed_by", "`events` if either was timed so", ("graph", "events")),
        _number("ratio", "time of the baseline over the time of ours", "1"),
        *(*INTERVAL, NOISE),
        _number("offset", "standard deviation of the difference between two processes", "1"),
        *(P, P_HOLM, VERDICT, NOTE),
    ),
)

CLAIMS = Table(
    "claims",
    "an operation and pass over the cells of the grid, against a baseline or the best of them",
    (
        _text("against", "each baseline, or the best rival", ("each", "best")),
        *(PART_OF, OP, FAMILY, PASS),
        _text("baseline", "the baseline; against the best rival, the closest one"),
        _count("rivals", "baselines that the claim is about"),
        TIMED_BY,
        _count("cells", "cells that are compared"),
        _count("of", "cells of ours, timed or not"),
        _number("ratio", "geometric mean of the baseline's time over ours", "1"),
        *(*INTERVAL, NOISE, P, P_HOLM, VERDICT, NOTE),
    ),
)

RATES = Table(
    "rates",
    "verdicts on studies resampled from this run's A/A gaps; none if there are fewer than 100",
    (
        _text("kind", "verdicts on cells, or claims", ("cell", "claim")),
        _text("calls", "all calls, or those of about 20 µs", ("all", "20 us")),
        _text("processes", "processes of each implementation: `as run`, or a number"),
        _text("truth", "the true difference that was put in"),
        _count("studies", "studies resampled"),
        _count("families", "families of verdicts in them"),
        _number("better", "share of families with a verdict `better`", "1"),
        _number("worse", "share of families with a verdict `worse`", "1"),
        _number("same", "share of families with a verdict `no difference`", "1"),
        _number("found", "share of single verdicts that are `better`", "1"),
        _number("level", "share of single verdicts that are `no difference`", "1"),
    ),
)

VERIFICATION = Table(
    "verification",
    "a verification report; status, reason and the worst ratio are of its ordinary cells, of ours "
    "of all",
    (
        *(OP, FAMILY, IMPL, VERSION, MODE),
        _count("cells", "cells that the implementation offers and that were reached"),
        _count("passed", "those among them that are right"),
        _count("hostile", "hostile ones among the cells"),
        _count("hostile_passed", "those among them that are right"),
        _count("unreached", "cells that the time limit left out, or that another part verifies"),
        _number("worst_ratio", "largest error over its bound", "1"),
        _text("worst_case", "the cell of that error"),
        _text("status", "status of the worst cell"),
        REASON,
    ),
)

CAPABILITIES = Table(
    "capabilities",
    "an operation, pass and data type of a report; a report without cells is one row",
    (
        *(OP, FAMILY, IMPL, VERSION, PASS, DTYPE, MODE),
        _count("of", "ordinary cells"),
        _count("cells", "ordinary cells that were reached"),
        _count("passed", "those among them that are right"),
        _count("declined", "those among them that the library does not offer"),
        _count("hostile_of", "hostile cells"),
        _count("hostile", "hostile cells that were reached"),
        _count("hostile_passed", "those among them that are right"),
        _count("hostile_declined", "those among them that the library does not offer"),
        _text(
            "status",
            "status of the worst ordinary cell; `unsupported` if all were declined, `unreached` if "
            "none was reached",
        ),
        REASON,
        _text("case", "first case with that status"),
    ),
)

GAPS = Table(
    "gaps",
    "a reason for which cells of such a row are not right",
    (
        *(OP, FAMILY, IMPL, VERSION, PASS, DTYPE, MODE),
        _flag("hostile", "whether the cells are hostile"),
        _text("status", "status of the cells"),
        REASON,
        _count("cells", "how many cells"),
        _text("case", "first of their cases"),
    ),
)

LEDGER = Table(
    "ledger",
    "an operation, pass and data type of a report with a right cell",
    (
        *(OP, FAMILY, IMPL, VERSION, PASS, DTYPE, MODE),
        _text("case", "case of the call that was observed"),
        _count("input_bytes", "inputs of the call", "byte"),
        _count("output_bytes", "results of the call", "byte"),
        _count("saved_bytes", "tensors saved for the backward pass, beyond both", "byte"),
        _count("workspace_bytes", "memory of the caching allocator beyond all results", "byte"),
        _count("overwritten_bytes", "inputs that the call writes over", "byte"),
        _count("launches", "kernels launched"),
        _count("memory_ops", "copies and fills on the GPU"),
        _count("copies", "operators of PyTorch that copy"),
        _count("casts", "those among them that change the data type"),
        _text("float32_precision", "precision that PyTorch allows float32 products"),
        _text("accumulates", "data type of sums, as the baseline's file declares it"),
        _text("settings", "how the call departs from the library's default"),
        _text("wide", "tensors that the library holds in float32, made outside of the clock"),
        _flag("deterministic", "False if a repeat of any cell gave other bits"),
        _text("timed_by", "`graph`, `events`, or both"),
        _text("kernels", "launches by name of the kernel"),
        _text("status", "status of the call that was observed"),
        REASON,
    ),
)

SANITIZER = Table(
    "sanitizer",
    "a tool of compute-sanitizer on a kernel file, of this run, else as recorded",
    (
        FILE,
        _text("code", "whose code it saw; empty if the report does not tell", ("present", "other")),
        _text("tool", "name of the tool"),
        _text("version", "version of compute-sanitizer"),
        _count("cases", "cases that ran"),
        _text("status", "what the tool said", ("ok", "findings", "crashed", "hung")),
        _count("findings", "findings in kernels of ours"),
        _count("elsewhere", "findings in other kernels"),
        _number("seconds", "time that the tool took", "s"),
        REASON,
    ),
)

RESOURCES = Table(
    "resources",
    "a kernel compiled for an architecture with a configuration",
    (
        *(FILE, KERNEL),
        _text("arch", "`80`, `90`, … for sm_80, sm_90, …; or an AMD architecture"),
        _text("config", "the configuration: `BLOCK_M=128 num_warps=8`"),
        _flag("default", "whether the kernel's rule chooses it"),
        DTYPE,
        _text("status", "`unsupported` if it does not compile", ("ok", "unsupported")),
        REASON,
        _count("registers", "registers of a thread"),
        _count("spill_stores", "bytes stored for lack of registers", "byte"),
        _count("spill_loads", "bytes loaded for lack of registers", "byte"),
        _count("shared_bytes", "shared memory of a program", "byte"),
        _flag("fits", "whether that fits; empty if the limit is unknown"),
        _count("warps", "warps of a program"),
        _count("stages", "stages of the software pipeline"),
        _count("<instruction>", "such instructions in the PTX or the AMD assembly"),
        _text("sha256", "SHA-256 of the binary"),
        _text("text_sha256", "SHA-256 of the assembly without the kernel's name"),
    ),
)

IR = Table(
    "ir",
    "a stage of the compilation of a kernel",
    (
        *(FILE, KERNEL),
        _text("stage", "form of the code", ("ttir", "ttgir", "llir", "ptx", "sass")),
        _count("bytes", "length of the text", "byte"),
        _count("lines", "lines of the text"),
    ),
)

RUNS = Table(
    "runs",
    "a run that rows come from",
    (
        RUN_ID,
        _text("mode", "whether the times were measured here", ("measured", "replayed")),
        _text("date", "when the run began, UTC"),
        _text("commit", "commit of the tree that was measured"),
        _flag("dirty", "whether files differed from it"),
        _text("machine", "the last part of the run's identifier"),
        _text("gpu", "name of the GPU"),
        _text("board", "its UUID"),
        _text("environment_sha256", "SHA-256 of the description of the machine"),
        _text("harness_sha256", "SHA-256 of the code that held the clock; empty in older records"),
        _text("ops", "operations whose times it took"),
        _text("changed_ops", "those among them whose code or Triton differ from what it verified"),
    ),
)

ENVIRONMENT = Table(
    "environment",
    "a key of the description of a run's machine, and `environment_sha256`",
    (
        RUN_ID,
        _text("key", "key; nested ones joined by points"),
        _text("value", "its value"),
    ),
)

CEILINGS = Table("ceilings", "a rate of a GPU", (*CEILING, BOARD))
SHOWN_CEILINGS = Table(
    "shown_ceilings", "a rate of a GPU of a run shown", (RUN_ID, *CEILING, BOARD)
)

DATASHEETS = Table(
    "datasheets",
    "a figure of a GPU's data sheet",
    (
        _text("gpu", "model of the GPU"),
        *QUANTITY,
        _text("source", "title, date and form of the sheet"),
    ),
)

TUNING = Table(
    "tuning",
    "a key of a tuned table in force for the GPU of a run shown",
    (
        *(RUN_ID, FILE, KERNEL),
        _text("key", "arguments of the kernel's rule"),
        _text("config", "the configuration in force"),
        _number("us", "GPU time of the kernel alone on a cold L2", "µs"),
        _text("rule", "what the rule chooses"),
        _flag("changed", "whether the two differ"),
        _text("runner_up", "the fastest other configuration"),
        _number("gap", "its time over the winner's, less one", "1"),
        _flag("tie", "whether the interval of the gap reaches below 1 %"),
        _count("candidates", "configurations with a time"),
        _text("state", "what is amiss; empty if nothing is", ("stale", "incomplete")),
    ),
)

OVERHEAD = Table(
    "overhead",
    "an operation, and last `all`",
    (
        OP,
        _number("total_s", "wall time of the measurement", "s"),
        _number("timed_s", "timed work with its warm-up and flushes", "s"),
        _number("first_s", "first calls, in which libraries compile and tune", "s"),
        _number("share", "share of the wall time that is neither", "1"),
        _count("blocks", "rows with a time"),
        _count("cells", "cells that were reached"),
        _count("self_tuned", "libraries that had tuned themselves alone before"),
        _count("tuned_elsewhere", "those among them that did so on another board"),
        _count("tuned_beside", "libraries that tuned themselves beside the first calls of others"),
        _count("host_cores", "cores on which the host's time was taken in turn, the fewest"),
    ),
)

SURVEY = Table(
    "survey",
    "a function that Triton, Gluon or CuTe compiles, or a text template with `def_kernel`",
    (
        _text("library", "distribution, or `ours`"),
        _text("version", "its version"),
        _text("file", "path in the distribution"),
        KERNEL,
        _text(
            "role",
            "`function`: compiled code calls it (it returns a value, is called by name in the "
            "library, or is CuTe's `jit`)",
            ("kernel", "function", "test"),
        ),
        _text("language", "what compiles it", ("triton", "gluon", "cute", "template")),
        _count("lines", "lines of the function"),
        _flag("autotuned", "whether it is declared with an autotuner"),
        _text("category", "kind of operation, by the names of folder, file and function"),
        _text(
            "source",
            "where it was read; `published`: by name, from source that no package holds",
            ("here", "installed", "snapshot", "published"),
        ),
        _text("date", "when it was read"),
    ),
)

NETWORK = Table(
    "network",
    "a stack in a case of an operation of a whole network",
    (
        *(OP, CASE, DTYPE),
        _text("preset", "name of the network's configuration"),
        _text("stack", "name of the stack: where the network's parts come from"),
        _count("batch", "sequences"),
        _count("length", "tokens of a sequence, of a prompt if tokens are decoded"),
        _count("tokens", "tokens that a call computes or decodes"),
        _text("launched", "what starts the kernels of a call; empty if the raw rows do not say"),
        _flag("sustained", "whether calls followed each other for seconds before the clock ran"),
        _number(
            "call_us",
            "wall time of a call, the host's work included: the median over blocks; empty if the "
            "raw rows have none",
            "µs",
        ),
        _number("call_lo", "lower bound of its 95 % interval, by the scatter of blocks", "µs"),
        _number("call_hi", "upper bound of that interval", "µs"),
        _number(
            "device_us",
            "GPU time of a call on a cold L2, which the host submits ahead: the median over blocks",
            "µs",
        ),
        _number("device_lo", "lower bound of its 95 % interval", "µs"),
        _number("device_hi", "upper bound of that interval", "µs"),
        _number("tokens_per_s", "tokens over the wall time", "1/s"),
        _number("mfu", "FLOPs of the model over the wall time and the peak rate of the dtype", "1"),
        _text("peak", "source of that peak rate"),
        PEAK,
        _number("energy_mj_per_token", "energy of a call over its tokens", "mJ"),
        _number("speedup_vs_eager", "wall time of `torch_eager` over that of this row", "1"),
        _number("device_speedup_vs_eager", "GPU time of `torch_eager` over that of this row", "1"),
        *(STATUS, REASON),
    ),
)

# The GPU and the code of a row.
TAKEN = (
    _text("gpu", "name of the GPU; empty on a CPU"),
    _text("board", "its UUID"),
    _text("commit", "commit of the tree; ends in `-dirty` if files differed from it"),
)
STEP = (
    _text("preset", "name of the network's configuration", filled=True),
    _count("batch", "sequences of a step", filled=True),
    _count("length", "tokens of a sequence", filled=True),
    DTYPE,
    _text("stack", "where the network's parts come from", filled=True),
)
STEP_US = _number("us", "wall time of a step, GPU and host", "µs")
PART_NAME = _text("part", "part of the network; `other` is none, such as a sum of gradients")
STEP_PARTS = Table(
    "step_parts",
    "a part and pass of a training step, by PyTorch's profiler",
    (
        *STEP,
        PART_NAME,
        _text("pass", "pass to which the time belongs", ("forward", "backward")),
        _number("us", "time of the GPU, of the host on a CPU: the median of three profiles", "µs"),
        _number("step_us", "wall time of the step without the profiler: the median", "µs"),
        *(STATUS, REASON, *TAKEN),
    ),
)
PARTS_ALONE = Table(
    "parts_alone",
    "a part by itself, on the arguments that it has in a step",
    (
        *STEP,
        PART_NAME,
        _count("calls", "calls in a step"),
        _number("us", "wall time of both passes of all these calls: medians, summed", "µs"),
        *(STATUS, REASON, *TAKEN),
    ),
)
STEP_LADDER = Table(
    "step_ladder",
    "a block of training steps of a rung; each rung has one part of ours more",
    (
        *STEP,
        _text("over", "the stack at the foot"),
        _count("rung", "number of parts of ours"),
        _text("part", "the part that this rung adds; empty at the foot"),
        _count("block", "number of the block; in each all rungs take turns"),
        STEP_US,
        PEAK,
        *(STATUS, REASON, *TAKEN),
    ),
)
STEP_MEMORY = Table(
    "step_memory",
    "a training step on one sequence of a length",
    (*STEP, STEP_US, PEAK, STATUS, REASON, *TAKEN),
)
STEP_POWER = Table(
    "step_power",
    "a training step; they follow one another after a rest",
    (
        *STEP,
        _count("call", "number of the step, from 0"),
        _number("us", "time of the step, from the end of the one before to its own", "µs"),
        _number("at_s", "end of the step, from the beginning of the first", "s"),
        READINGS[0],
        _number("energy_j", "energy of the board from the beginning of the first step on", "J"),
        *(STATUS, REASON, *TAKEN),
    ),
)
LOSS_PARITY = Table(
    "loss_parity",
    "a step of training",
    (
        *STEP,
        _count("seed", "seed of the weights"),
        _count("step", "number of the step, from 0"),
        _number("loss", "loss before the step", "1"),
        _text("text_sha256", "SHA-256 of the text"),
        *(STATUS, REASON, *TAKEN),
    ),
)
RUNG = (
    *(OP, CASE, DTYPE, PASS, IMPL),
    _count("rung", "number of the form of ours, from the simplest; empty for a baseline"),
    _text("adds", "the technique that this form adds to the one before it"),
    _count("block", "number of the block; in each all forms and baselines take turns"),
    _number("device_us", "GPU time of a call on a cold L2 cache; on a CPU its wall time", "µs"),
    FLOPS,
    *READINGS[:3],
    *(STATUS, REASON, *TAKEN),
)
MATMUL_LADDER = Table("matmul_ladder", "a block of a form of the matrix product", RUNG)
ATTENTION_LADDER = Table("attention_ladder", "a block of a form of attention", RUNG)
# How the name of a question about the forms of an op ends; it begins with the op.
LADDER = "_ladder"
# The files that `harness.measure.dissect` writes, by its subject.
STEPS = (STEP_PARTS, PARTS_ALONE, STEP_LADDER, STEP_MEMORY, STEP_POWER, LOSS_PARITY)
LADDERS = (MATMUL_LADDER, ATTENTION_LADDER)
DISSECTED = {table.name: table for table in (*STEPS, *LADDERS)}

# The files that `harness.summarize` writes into the folder of a run, in this order.
SUMMARIES = (
    *(SUMMARY, VERDICTS, CLAIMS, RATES, VERIFICATION, CAPABILITIES, GAPS, LEDGER, SANITIZER),
    *(RESOURCES, IR, RUNS, TUNING, ENVIRONMENT, SHOWN_CEILINGS, DATASHEETS, OVERHEAD),
    *(NETWORK, *DISSECTED.values()),
)
TABLES = {table.name: table for table in (RAW, CEILINGS, SURVEY, *SUMMARIES)}


def declared() -> str:
    """The declarations of the files that the paper reads, as the text of `columns.json`.

    An object by file of objects by column, each with its `kind` and `unit`.
    """
    shown = {
        table.name: {
            column.name: {"kind": column.kind, "unit": column.unit} for column in table.columns
        }
        for table in (*SUMMARIES, SURVEY)
    }
    return json.dumps(shown, indent=1, ensure_ascii=False) + "\n"
