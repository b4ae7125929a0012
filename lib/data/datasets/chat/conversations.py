"""Conversations from JSON Lines, in one of three formats that the first line decides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lib.data.jsonl import read_objects
from lib.errors import ConfigError
from lib.plugins import meant

ANSWERS = "assistant"  # the role whose messages are learned
ROLES = ("system", "developer", "user", ANSWERS, "tool")

Message = dict[str, str]  # role and content


class Conversation(NamedTuple):
    """A conversation with its place (file:line). It does not begin with an answer, and ends with one."""

    place: str
    messages: list[Message]


def read_conversations(file: Path) -> tuple[list[Conversation], list[str]]:
    """Read the conversations of a file, and the keys of its lines that are not read.

    Messages after the last answer are left out: nothing is learned of them. Raises ConfigError, with file and
    line, for a line that cannot be used.
    """
    found, first, unread = list[Conversation](), "", set[str]()
    for place, line in read_objects(file):
        kind = next((kind for kind in _KINDS if kind in line), "")
        if not kind:
            todo = "write messages, prompt and completion, or instruction and output"
            raise ConfigError(f"{place} is no conversation", why=f"it has {_names(line)}", todo=todo)
        if kind != (first := first or kind):
            why = f"it has {kind!r}, and the first line has {first!r}"
            raise ConfigError(f"{place} is of another format", why=why, todo="write all lines alike")
        names, read = _KINDS[kind]
        messages = read(place, line)
        last = max((n for n, each in enumerate(messages) if each["role"] == ANSWERS), default=-1)
        if last < 1:
            fault = "begins with an answer" if last == 0 else f"has no message of the {ANSWERS}"
            raise ConfigError(f"{place} {fault}", todo="leave the line out, or add what is missing")
        unread |= line.keys() - {*names}
        found.append(Conversation(place, messages[: last + 1]))
    return found, sorted(unread)


def _names(line: dict[str, Any]) -> str:
    return ", ".join(map(repr, line)) or "nothing"


def _messages(place: str, line: dict[str, Any]) -> list[Message]:
    given = line["messages"]
    if not (isinstance(given, list) and given and all(isinstance(each, dict) for each in given)):
        raise ConfigError(f'{place}: "messages" is no list of messages', todo='write [{"role": ...}, ...]')
    for number, message in enumerate(given, start=1):
        at = f"{place}, message {number}"
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ConfigError(f"{at} has the role {role!r}", todo=meant(role, ROLES))
        if not isinstance(content, str) or not (content or role != ANSWERS):
            raise ConfigError(f'{at}: "content" is {"empty" if content == "" else "no text"}')
        if further := [name for name in message if name not in ("role", "content")]:
            raise ConfigError(f"{at} has {further[0]!r}", why="a message has role and content", todo="drop it")
    return given


def _pair(*questions: str, answer: str) -> Callable[[str, dict[str, Any]], list[Message]]:
    """Return the reader of a question in one or two texts, the second of which may be missing, and its answer."""

    def read(place: str, line: dict[str, Any]) -> list[Message]:
        first, *others = (_text(place, line, name, needed=name != "input") for name in questions)
        asked = "\n\n".join([first, *filter(None, others)])
        reply = _text(place, line, answer)
        return [{"role": "user", "content": asked}, {"role": ANSWERS, "content": reply}]

    return read


def _text(place: str, line: dict[str, Any], name: str, *, needed: bool = True) -> str:
    found = line.get(name, None if needed else "")
    if not isinstance(found, str) or not (found or not needed):
        raise ConfigError(f'{place}: "{name}" is {"empty" if found == "" else "no text"}')
    return found


# By the key that tells the format: the keys that are read, and how.
_KINDS: dict[str, tuple[tuple[str, ...], Callable[[str, dict[str, Any]], list[Message]]]] = {
    "messages": (("messages",), _messages),
    "prompt": (("prompt", "completion"), _pair("prompt", answer="completion")),
    "instruction": (
        ("instruction", "input", "output"),
        _pair("instruction", "input", answer="output"),
    ),
}
