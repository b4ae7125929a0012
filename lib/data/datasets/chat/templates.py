"""Templates: from the messages of a conversation to tokens, with a mark at those that are learned."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from datetime import date
from typing import Any, NamedTuple

from lib.data.datasets.chat.conversations import ANSWERS, Conversation, Message
from lib.data.huggingface_tokenizer import HuggingFaceTokenizer
from lib.data.types import Tokenizer
from lib.errors import ConfigError
from lib.nn.model_directory import in_a_line
from lib.nn.packages import import_extra

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TODAY = date(2024, 7, 26)  # of templates that tell it: with data of another day no run is resumed
_CODES = "".join(f"|replace('%{code}', '{_TODAY:%{code}}')" for code in "aAbBdHmMSyY")
_DATED = f"{{% macro strftime_now(format) %}}{{{{ format{_CODES} }}}}{{% endmacro %}}\n"


_MEND = "mend the template, or copy it again"
_PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt else '' }}"
)
_PROBE = [
    {"role": role, "content": content}
    for role, content in (("system", "Be brief."), ("user", "Hi there, 2+2?"), (ANSWERS, "It's 4"))
] * 2


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
        self._tokenizer = tokenizer

    def jinja(self) -> str | None:
        """Return this template for transformers; None where that tokenizes it otherwise, or has no such end.

        It tokenizes a whole conversation at once, which some tokenizers do otherwise than parts.
        """
        tokenizer = self._tokenizer
        if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.end is None:
            return None
        found = _PLAIN if self._start is None else "{{ bos_token }}" + _PLAIN
        same = tokenizer.inner.apply_chat_template(_PROBE, chat_template=found, return_dict=False)
        return found if same == self.sample(Conversation("probe", _PROBE)).ids else None

    @staticmethod
    def text(message: Message) -> tuple[str, str]:
        """Return head and body of a message."""
        return f"{message['role']}:", f" {message['content']}" + "\n" * (message["role"] != ANSWERS)

    def prompt(self, question: Conversation) -> list[int]:
        """Return the tokens of messages that an answer is to follow."""
        return self.sample(question).ids + self._encode(f"{ANSWERS}:")

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
        """Raises ConfigError for a tokenizer without offsets, and for a template that cannot be used."""
        self._inner, self.vocab_size = tokenizer.inner, tokenizer.vocab_size
        if not self._inner.is_fast:
            what = f"the tokenizer in {tokenizer.folder} does not tell the places of its tokens"
            raise ConfigError(what, todo="convert it to a tokenizer.json")
        own = tokenizer.folder / "chat_template.jinja"
        self._file = own if own.is_file() else tokenizer.folder / "tokenizer_config.json"
        try:
            self._template: str = self._inner.get_chat_template()
        except ValueError as error:  # several, and none of them the default
            raise ConfigError(
                f"{self._file} has no chat template", why=in_a_line(error), todo=_MEND
            ) from error
        self._lines_before = 0
        if "strftime_now" in self._template:
            self.name, self._template = f"{self.name} at {_TODAY}", _DATED + self._template
            self._lines_before = _DATED.count("\n")
        self._check_syntax()
        self._has_marks = bool(_MARK.search(self._template))
        self._special = {*self._inner.all_special_ids, *self._inner.added_tokens_decoder}
        self._end, self._usual_end = -1, -1 if tokenizer.end is None else tokenizer.end

    def _check_syntax(self) -> None:
        from jinja2 import TemplateSyntaxError

        try:
            self._render([])
        except TemplateSyntaxError as error:
            place, why = f"{self._file}:{error.lineno - self._lines_before}", in_a_line(error)
            raise ConfigError(f"{place}: the chat template cannot be read", why=why, todo=_MEND) from error

    def _render(self, conversations: Any, **options: bool) -> Any:
        render = import_extra("transformers.utils.chat_template_utils").render_jinja_template
        own = {"chat_template": self._template, **self._inner.special_tokens_map}
        return render(conversations=conversations, **own, **options)

    @property
    def end(self) -> int:
        """Token after an answer: the last special one in the samples, which need not be that of texts."""
        return self._usual_end if self._end < 0 else self._end

    def prompt(self, question: Conversation) -> list[int]:
        """Return the tokens of messages that an answer is to follow. Raises as `sample`."""
        text, _ = self._rendered(question, question.messages, add_generation_prompt=True)
        ids: list[int] = self._inner.encode(text, add_special_tokens=False)
        return ids

    def sample(self, conversation: Conversation) -> Sample:
        """Return a conversation in tokens. Raises ConfigError for one that the template refuses."""
        text, spans = self._rendered(conversation, conversation.messages)
        rewritten = False
        if not self._has_marks:
            spans, rewritten = self._found(conversation, text)
        # The library's own mask is wrong where an answer begins or ends with a space that no offset has.
        tokens = self._inner(text, add_special_tokens=False, return_offsets_mapping=True)
        counts = [
            # Some tokenizers leave spaces out of the offsets: a token of spaces is where it ends.
            any(first <= start and first < stop <= last for first, last in spans)
            for start, stop in tokens["offset_mapping"]
        ]
        ids: list[int] = tokens["input_ids"]
        if self._end < 0:
            pairs = zip(reversed(ids), reversed(counts), strict=True)
            self._end = next((token for token, count in pairs if count and token in self._special), -1)
        return Sample(conversation.place, ids, counts, rewritten)

    def _found(self, conversation: Conversation, text: str) -> tuple[list[tuple[int, int]], bool]:
        """Return where answers are in `text`; the last one alone if earlier ones are rendered otherwise."""
        messages, spans = conversation.messages, list[tuple[int, int]]()
        answers = [number for number, each in enumerate(messages) if each["role"] == ANSWERS]
        for number in answers:
            before, _ = self._rendered(conversation, messages[:number], add_generation_prompt=True)
            after, _ = self._rendered(conversation, messages[: number + 1])
            if text.startswith(before) and text.startswith(after) and len(before) < len(after):
                spans.append((len(before), len(after)))
            elif number == answers[-1]:
                what = f"{conversation.place}: the chat template does not tell where the last answer begins"
                why = "the text before it, with the prompt for an answer, does not begin the whole text"
                todo = "mark answers in the template with {% generation %} and {% endgeneration %}"
                raise ConfigError(what, why=why, todo=todo)
        rewritten = len(spans) < len(answers)
        return spans[-1 if rewritten else 0 :], rewritten

    def _rendered(
        self, conversation: Conversation, messages: Sequence[Message], **options: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return messages as text, and what is marked in it."""
        from jinja2 import TemplateError

        options |= {"return_assistant_tokens_mask": self._has_marks}
        try:
            (text,), marks = self._render([[*messages]], **options)
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            what = f"{conversation.place}: the chat template refuses these messages"
            todo = "leave the line out, or change its messages"
            if type(error) is not TemplateError:  # which is what a template raises itself
                todo += f", or mend {self._line_of(error)}"
            raise ConfigError(what, why=in_a_line(error), todo=todo) from error
        return text, marks[0] if marks else []

    def _line_of(self, error: Exception) -> str:
        """Return the file of the template, with the line that raised `error` where that is known."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == "<template>" and frame.lineno]
        return f"{self._file}:{lines[-1] - self._lines_before}" if lines else str(self._file)


def check_contents(conversation: Conversation, tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a message whose text the tokenizer takes for more than text."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return
    for message in conversation.messages:
        if found := tokenizer.controls.search(message["content"]):
            why = "the tokenizer makes a control token of it, as the template does between messages"
            todo = "give the text of each message alone, or leave the line out"
            raise ConfigError(f"{conversation.place} has {found[0]} in a message", why=why, todo=todo)


def end_note(template: PlainTemplate | ChatTemplate, tokenizer: Tokenizer) -> list[str]:
    """Return a line if answers do not end with a token of a tokenizer of Hugging Face, once samples exist."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or 0 <= template.end < tokenizer.vocab_size:
        return []
    end = (
        "with a token that it does not have"
        if template.end >= 0
        else "with no token that stands for their end"
    )
    return [f"NOTE: the tokenizer has no eos_token, so answers end {end}: name one in tokenizer_config.json"]


def template_of(tokenizer: Tokenizer) -> PlainTemplate | ChatTemplate:
    """Return the tokenizer's own template, else the plain one."""
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.inner.chat_template:
        return ChatTemplate(tokenizer)
    return PlainTemplate(tokenizer)
