"""Templates: from the messages of a conversation to tokens, with a mark at those that are learned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from lib.data.datasets.chat.conversations import ANSWERS, Conversation, Message
from lib.data.huggingface_tokenizer import HuggingFaceTokenizer
from lib.data.types import Tokenizer
from lib.errors import ConfigError

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Sample(NamedTuple):
    """A conversation in tokens. counts: those of answers, which the loss counts.

    rewritten: earlier answers are rendered otherwise once messages follow, so only the last one counts.
    """

    place: str
    ids: list[int]
    counts: list[bool]
    rewritten: bool = False


class PlainTemplate:
    """`ROLE: CONTENT` and a line end for each message; after an answer there is the token `end` instead.

    Head and body of a message are tokenized apart, so the tokens of a beginning begin those of the whole.
    """

    name = "the plain template"

    def __init__(self, tokenizer: Tokenizer) -> None:
        own: int | None = getattr(tokenizer, "end", None)
        self.end = tokenizer.vocab_size if own is None else own
        self.vocab_size = max(tokenizer.vocab_size, self.end + 1)
        self._encode, self._start = tokenizer.encode, getattr(tokenizer, "start", None)

    @staticmethod
    def text(message: Message) -> tuple[str, str]:
        """Return head and body of a message."""
        return f"{message['role']}:", f" {message['content']}" + "\n" * (message["role"] != ANSWERS)

    def sample(self, conversation: Conversation) -> Sample:
        """Return a conversation in tokens."""
        ids: list[int] = [] if self._start is None else [self._start]
        counts = [False] * len(ids)
        for message in conversation.messages:
            head, body = map(self._encode, self.text(message))
            is_answer = message["role"] == ANSWERS
            ids += head + body + [self.end] * is_answer
            counts += [False] * len(head) + [is_answer] * (len(body) + is_answer)
        return Sample(conversation.place, ids, counts)


class ChatTemplate:
    """The template of a tokenizer of Hugging Face, which transformers runs in a sandbox.

    Answers are what its {% generation %} marks, if it has any. Else each is found by rendering the messages
    before it with the prompt for an answer, and those up to it: both have to begin the whole text.
    """

    name = "the chat template of the tokenizer"

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        """Raises ConfigError for a tokenizer without offsets."""
        self._inner, self.vocab_size = tokenizer.inner, tokenizer.vocab_size
        if not self._inner.is_fast:
            what = f"the tokenizer in {tokenizer.folder} does not tell the places of its tokens"
            raise ConfigError(what, todo="convert it to a tokenizer.json")
        self._has_marks = bool(_MARK.search(self._inner.get_chat_template()))
        self._special = {*self._inner.all_special_ids, *self._inner.added_tokens_decoder}
        self._end, self._usual_end = -1, -1 if tokenizer.end is None else tokenizer.end

    @property
    def end(self) -> int:
        """Token after an answer: the last special one in the samples, which need not be that of texts."""
        return self._usual_end if self._end < 0 else self._end

    def sample(self, conversation: Conversation) -> Sample:
        """Return a conversation in tokens. Raises ConfigError for one that the template refuses."""
        found = self._marked(conversation) if self._has_marks else self._by_prefixes(conversation)
        if self._end < 0:
            pairs = zip(reversed(found.ids), reversed(found.counts), strict=True)
            self._end = next((token for token, counts in pairs if counts and token in self._special), -1)
        return found

    def _marked(self, conversation: Conversation) -> Sample:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        found = self._apply(conversation, conversation.messages, **options)
        return Sample(conversation.place, found["input_ids"], [*map(bool, found["assistant_masks"])])

    def _by_prefixes(self, conversation: Conversation) -> Sample:
        messages, spans = conversation.messages, list[tuple[int, int]]()
        text = self._apply(conversation, messages, tokenize=False)
        answers = [number for number, each in enumerate(messages) if each["role"] == ANSWERS]
        for number in answers:
            before, after = (
                self._apply(conversation, messages[:stop], tokenize=False, add_generation_prompt=asks)
                for stop, asks in ((number, True), (number + 1, False))
            )
            if text.startswith(before) and text.startswith(after) and len(before) < len(after):
                spans.append((len(before), len(after)))
            elif number == answers[-1]:
                what = f"{conversation.place}: the chat template does not tell where the last answer begins"
                why = "the text before it, with the prompt for an answer, does not begin the whole text"
                todo = "mark answers in the template with {% generation %} and {% endgeneration %}"
                raise ConfigError(what, why=why, todo=todo)
        rewritten = len(spans) < len(answers)
        tokens = self._inner(text, add_special_tokens=False, return_offsets_mapping=True)
        counts = [
            any(first <= start < stop <= last for first, last in spans[-1 if rewritten else 0 :])
            for start, stop in tokens["offset_mapping"]
        ]
        return Sample(conversation.place, tokens["input_ids"], counts, rewritten)

    def _apply(self, conversation: Conversation, messages: Sequence[Message], **options: bool) -> Any:
        from jinja2 import TemplateError  # transformers renders with it

        try:
            return self._inner.apply_chat_template([*messages], **options)
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            why, todo = " ".join(str(error).split())[:200], "leave the line out, or change its messages"
            what = f"{conversation.place}: the chat template refuses these messages"
            raise ConfigError(what, why=why, todo=todo) from error


def template_of(tokenizer: Tokenizer) -> PlainTemplate | ChatTemplate:
    """Return the tokenizer's own template, else the plain one."""
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.inner.chat_template:
        return ChatTemplate(tokenizer)
    return PlainTemplate(tokenizer)
