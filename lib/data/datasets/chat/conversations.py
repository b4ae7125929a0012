"""Conversations from JSON Lines, in one of three formats that the first line decides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lib.data.datasets.key_values import PartName, questions
from lib.data.jsonl import read_objects, value_of
from lib.errors import ConfigError, close_to, meant

ANSWERS = "assistant"  # the role whose messages are learned
ROLES = ("system", "developer", "user", ANSWERS, "tool")
_OTHER_NAMES = {"human": "user", "gpt": ANSWERS, "model": ANSWERS, "bot": ANSWERS, "function": "tool"}
# By the key that tells the format: all keys that are read, the answer last; "input" may be missing.
FORMATS = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "input", "output"),
}

Message = dict[str, str]  # role and content


class Conversation(NamedTuple):
    """A conversation with its place (file:line). It does not begin with an answer, and ends with one."""

    place: str
    messages: list[Message]


def read_conversations(
    file: Path, *, open_ended: bool = False, content: bytes | None = None
) -> tuple[list[Conversation], set[str]]:
    """Read the conversations of a file, and the keys of its lines that are not read.

    Messages after the last answer are left out: nothing is learned of them. open_ended: all are kept, and the
    last one need not be an answer. content: of `file`, where it is no file. Raises ConfigError, with file and
    line, for a line that cannot be used.
    """
    first, unread = "", set[str]()

    def parse(place: str, line: dict[str, Any]) -> Conversation:
        nonlocal first
        kind = next((kind for kind in FORMATS if kind in line), "")
        if kind == "" or kind != (first := first or kind):
            why = f"it has the keys {', '.join(line)}{first and f', and the first line has {first}'}"
            todo = "give all lines messages, or prompt and completion, or instruction and output"
            raise ConfigError(f"{place} is no conversation of the format", why=why, todo=todo)
        unread.update(line.keys() - {*FORMATS[kind]})
        if kind == "messages":
            messages = _messages(place, line["messages"])
        else:
            messages = _pair(place, line, kind, answered=not open_ended or FORMATS[kind][-1] in line)
        if open_ended and (messages[-1]["role"] != ANSWERS or messages[1:]):
            return Conversation(place, messages)
        last = max((n for n, each in enumerate(messages) if each["role"] == ANSWERS), default=-1)
        if last < 1:
            fault = "begins with an answer" if last == 0 else f"has no message of the {ANSWERS}"
            raise ConfigError(f"{place} {fault}", todo="leave the line out, or add what is missing")
        return Conversation(place, messages[: last + 1])

    return read_objects(file, parse, content=content), unread


def _messages(place: str, given: Any) -> list[Message]:
    if not (isinstance(given, list) and given and all(isinstance(each, dict) for each in given)):
        raise ConfigError(f'{place}: "messages" is no list of messages', todo='write [{"role": ...}, ...]')
    for number, message in enumerate(given, start=1):
        at = f"{place}, message {number}"
        if (role := value_of(at, message, "role")) not in ROLES:
            instead = _OTHER_NAMES.get(role) if isinstance(role, str) else None
            todo = f"write {instead} for it" if instead else f"write one of {', '.join(ROLES)}"
            raise ConfigError(
                f"{at} has the role {role!r}", todo=meant(role, ROLES) if close_to(role, ROLES) else todo
            )
        _check_text(at, message, "content", may_be_empty=role != ANSWERS)
        if further := [name for name in message if name not in ("role", "content")]:
            raise ConfigError(
                f"{at} has {further[0]!r}", why="only role and content are read", todo="drop it"
            )
    return given


def _pair(place: str, line: dict[str, Any], kind: str, *, answered: bool) -> list[Message]:
    texts, (*before, answer) = {"input": ""} | line, FORMATS[kind]
    for name in (*before, answer) if answered else before:
        if name in line or name != "input":
            _check_text(place, line, name, may_be_empty=name == "input")
    question = "\n\n".join(filter(None, (texts[name] for name in before)))
    messages = [{"role": "user", "content": question}]
    return [*messages, {"role": ANSWERS, "content": texts[answer]}] if answered else messages


def _check_text(at: str, texts: dict[str, Any], name: str, *, may_be_empty: bool) -> None:
    found = value_of(at, texts, name)
    if not isinstance(found, str) or not (found or may_be_empty):
        raise ConfigError(f'{at}: "{name}" is {"empty" if found == "" else "no text"}', todo="give a text")


def key_values(part: PartName, *, backwards: bool) -> list[Conversation]:
    """Return the synthetic questions of a part with their answers.

    backwards: questions have "<" in place of "?", and answers their letters in reverse order.
    """
    found = list[Conversation]()
    for number, (source, answer) in enumerate(questions(part), start=1):
        question, letters = source, answer.strip()
        if backwards:
            question, letters = source.replace("?", "<"), letters[::-1]
        messages = [{"role": "user", "content": question}, {"role": ANSWERS, "content": letters}]
        found.append(Conversation(f"{part}:{number}", messages))
    return found


def with_other_answers(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Return conversations, each with the last answer of another one: a control that nothing can learn from.

    The next one in a random cycle through all, so that none keeps its own.
    """
    order = np.random.default_rng(0).permutation(len(conversations))
    others = np.empty_like(order)
    others[order] = np.roll(order, -1)
    return [
        Conversation(each.place, [*each.messages[:-1], conversations[other].messages[-1]])
        for each, other in zip(conversations, others.tolist(), strict=True)
    ]
