"""Messages between a parent and its worker: dataclasses, and their form as JSON.

A stage declares its requests and answers in its own `messages.py`. A request names the method of
the worker that serves it, and the class of the answer. The receiver checks each message against its
class, because a library can write into the socket of a worker. This module and those of the stages
import neither torch nor Triton, so parents stay light.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import ClassVar

KIND = "message"


class MessageError(ValueError):
    """A message that is not of an expected class; the text names the class and the field."""


@dataclass(frozen=True)
class Pid:
    """The first line of a worker: the number of its process, which is that of its group too."""

    pid: int


@dataclass(frozen=True)
class Answer:
    """An answer of a worker. spent_s: the seconds that its work took, 0 if no worker answered."""

    spent_s: float = field(default=0.0, kw_only=True, compare=False)


@dataclass(frozen=True)
class Done(Answer):
    """The answer to a request that asks for work and for no result."""


@dataclass(frozen=True)
class Hello(Answer):
    """The answer to the start of a worker. impl_version: the version of the library it runs."""

    impl_version: str


@dataclass(frozen=True)
class Failure(Answer):
    """The answer of a worker that failed, or of its parent in the place of a dead worker.

    status: one of `harness.status`, never "ok". reason: one line for the reader of the results.
    """

    status: str
    reason: str


@dataclass(frozen=True)
class Request:
    """A request to a worker; its fields are the arguments of the method `do`.

    answer: the class of the answer. A method that returns None answers Done.
    """

    do: ClassVar[str]
    answer: ClassVar[type[Answer]] = Done


def encode(message: object) -> dict[str, object]:
    """Return the JSON object of a message: the name of its class, and its fields."""
    return {KIND: type(message).__name__} | asdict(message)


def decode(data: object, *kinds: type) -> typing.Any:
    """Return the message that a JSON value holds, an instance of one of the classes `kinds`.

    Raises MessageError if the class is another one, if a field is missing or unknown, or if a value
    is not of the field's type.
    """
    if not isinstance(data, Mapping) or KIND not in data:
        raise MessageError("no message")
    kind = next((each for each in kinds if each.__name__ == data[KIND]), None)
    if kind is None:
        raise MessageError(f"{data[KIND]!r} in place of {' or '.join(k.__name__ for k in kinds)}")
    given = {name: value for name, value in data.items() if name != KIND}
    hints = typing.get_type_hints(kind)
    names = {each.name for each in fields(kind)}
    if missing := sorted(names - set(given)):
        raise MessageError(f"{kind.__name__} without {missing[0]}")
    if unknown := sorted(set(given) - names):
        raise MessageError(f"{kind.__name__} with an unknown field {unknown[0]!r}")
    for name, value in given.items():
        if not _fits(value, hints[name]):
            raise MessageError(f"{kind.__name__} with {name} = {value!r:.80}")
    return kind(**given)


def _fits(value: object, hint: object) -> bool:
    """Whether a JSON value is of the type that a field declares."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is object:
        return True
    if origin is types.UnionType:
        return any(_fits(value, each) for each in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, arguments[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(name, arguments[0]) and _fits(each, arguments[1]) for name, each in value.items()
        )
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)
