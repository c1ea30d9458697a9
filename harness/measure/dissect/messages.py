"""Messages between the ladder of a kernel and the worker of one of its forms.

Blocks and the last check are asked for as by the schedule, see `harness.measure.messages`.
"""

from dataclasses import dataclass
from typing import ClassVar

from harness.measure.messages import Check, TimeBlock
from harness.workers.messages import Answer, Request


@dataclass(frozen=True)
class FormReady(Answer):
    """A form is right, and ready to be timed.

    - remark: why events time the calls and no graph does, "" if a graph does.
    - calls: how many calls fill the time of a block.
    """

    remark: str
    calls: int


@dataclass(frozen=True)
class PrepareForm(Request):
    """Prepare a cell: the name of a case, a dtype and a pass.

    rung: the number of the form in the ladder of op and pass; None for a baseline.
    """

    do: ClassVar[str] = "prepare"
    answer: ClassVar[type[Answer]] = FormReady
    case: str
    dtype: str
    pass_: str
    rung: int | None


REQUESTS = (PrepareForm, TimeBlock, Check)
