"""Templates: from the messages of a conversation to tokens, with a mark at those that are learned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from lib.data.datasets.chat.conversations import ANSWERS, Conversation, Message
from lib.data.huggingface_tokenizer import HuggingFaceTokenizer
from lib.data.types import Tokenizer
from lib.errors import ConfigError

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Sample(NamedTuple):
    """A conversation in tokens. counts: those of answers, which the loss counts.

    rewritten: the template renders earlier answers otherwise once others follow, so only the last one counts.
    """

    place: str
    ids: list[int]
    counts: list[bool]
    rewritten: bool = False


class Template(Protocol):
    """A template. name: for messages. end: the token after an answer. size: of the vocabulary."""

    name: str
    end: int
    size: int

    def sample(self, conversation: Conversation) -> Sample:
        """Return a conversation in tokens. Raises ConfigError for one that the template refuses."""


def template_of(tokenizer: Tokenizer) -> Template:
    """Return the tokenizer's own template, else the plain one. Raises ConfigError if it gives no offsets."""
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.inner.chat_template:
        return ChatTemplate(tokenizer)
    return PlainTemplate(tokenizer)


def plain_text(message: Message) -> tuple[str, str]:
    """Return the head and the body of a message in the plain template."""
    body = f" {message['content']}"
    return f"{message['role']}:", body if message["role"] == ANSWERS else f"{body}\n"


class PlainTemplate:
    """`ROLE: CONTENT` and a line end for each message; after an answer, the token `end` in place of the latter.

    Head and body of a message are tokenized apart, so the tokens of a beginning are the beginning of all tokens.
    """

    name = "the plain template"

    def __init__(self, tokenizer: Tokenizer) -> None:
        own: int | None = getattr(tokenizer, "end", None)
        self.end = tokenizer.vocab_size if own is None else own
        self.size = max(tokenizer.vocab_size, self.end + 1)
        self._tokenizer, self._start = tokenizer, getattr(tokenizer, "start", None)

    def sample(self, conversation: Conversation) -> Sample:
        """Return a conversation in tokens."""
        ids: list[int] = [] if self._start is None else [self._start]
        counts = [False] * len(ids)
        for message in conversation.messages:
            head, body = map(self._tokenizer.encode, plain_text(message))
            is_answer = message["role"] == ANSWERS
            body += [self.end] * is_answer
            ids += head + body
            counts += [False] * len(head) + [is_answer] * len(body)
        return Sample(conversation.place, ids, counts)


class ChatTemplate:
    """The template of a tokenizer of Hugging Face, which its package runs in a sandbox.

    Answers are what its {% generation %} marks, if it has any. Else each is found by rendering the messages
    before it with the prompt for an answer, and those up to it: both have to be beginnings of the whole text.
    """

    name = "the chat template of the tokenizer"

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._inner, self.size = tokenizer.inner, tokenizer.vocab_size
        if not self._inner.is_fast:
            todo = "convert it to a tokenizer.json"
            raise ConfigError(f"the tokenizer in {tokenizer.folder} gives no offsets of its tokens", todo=todo)
        self._marks = bool(_MARKS.search(self._inner.get_chat_template()))
        self._special = {*self._inner.all_special_ids, *self._inner.added_tokens_decoder}
        self.end: int = -1 if tokenizer.end is None else tokenizer.end
        self._known_end = False

    def sample(self, conversation: Conversation) -> Sample:
        """Return a conversation in tokens. Raises ConfigError for one that the template refuses."""
        found = self._marked(conversation) if self._marks else self._by_prefixes(conversation)
        if not self._known_end:  # some templates end an answer with another token than a text
            marked = [token for token, counts in zip(found.ids, found.counts, strict=True) if counts]
            self.end = next((token for token in reversed(marked) if token in self._special), self.end)
            self._known_end = True
        return found

    def _marked(self, conversation: Conversation) -> Sample:
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = self._apply(conversation, conversation.messages, **options)
        return Sample(conversation.place, found["input_ids"], [*map(bool, found["assistant_masks"])])

    def _by_prefixes(self, conversation: Conversation) -> Sample:
        messages = conversation.messages
        text = self._text(conversation, messages)
        spans, last = list[tuple[int, int]](), len(messages) - 1
        answers = [number for number, each in enumerate(messages) if each["role"] == ANSWERS]
        for number in answers:
            before = self._text(conversation, messages[:number], add_generation_prompt=True)
            after = self._text(conversation, messages[: number + 1]) if number < last else text
            if text.startswith(before) and text.startswith(after) and len(before) < len(after):
                spans.append((len(before), len(after)))
            elif number == last:
                why = "the text before it, with the prompt for an answer, is no beginning of the whole text"
                todo = "mark answers in the template by {% generation %} and {% endgeneration %}"
                raise ConfigError(f"{conversation.place}: the last answer cannot be found", why=why, todo=todo)
        rewritten = len(spans) < len(answers)
        spans = spans[-1:] if rewritten else spans
        tokens = self._inner(text, add_special_tokens=False, return_offsets_mapping=True)
        counts = [
            any(first <= start and start < stop <= end for first, end in spans)
            for start, stop in tokens["offset_mapping"]
        ]
        return Sample(conversation.place, tokens["input_ids"], counts, rewritten)

    def _text(self, conversation: Conversation, messages: Sequence[Message], **options: bool) -> str:
        text: str = self._apply(conversation, messages, tokenize=False, **options)
        return text

    def _apply(self, conversation: Conversation, messages: Sequence[Message], **options: bool) -> Any:
        from jinja2 import TemplateError  # transformers renders with it

        try:
            return self._inner.apply_chat_template(list(messages), **options)
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            why, todo = " ".join(str(error).split())[:200], "leave the line out, or change its messages"
            what = f"{conversation.place}: the chat template refuses these messages"
            raise ConfigError(what, why=why, todo=todo) from error
