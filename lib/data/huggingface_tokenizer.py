"""Tokenizers of Hugging Face transformers, an optional package, from a folder. Nothing is downloaded."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lib.data.types import Tokens, Unit
from lib.errors import ConfigError, DataError, os_errors
from lib.nn.model_directory import AGAIN, faults_of_values, in_a_line, read_configuration
from lib.nn.packages import import_extra

# Of a folder without any, transformers makes a tokenizer that knows no text.
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class HuggingFaceTokenizer:
    """Tokenizer of the model in `folder`. Only `encode_whole` adds special tokens."""

    name = "huggingface"
    unit: Unit = "token"

    def __init__(self, place: Path | str) -> None:
        """Raises ConfigError without the package, and if the folder at `place` has no tokenizer."""
        folder = Path(place)
        transformers = import_extra("transformers")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        if not folder.is_dir():  # otherwise transformers takes it for a name on the Hub
            raise ConfigError(f"{folder} is not a directory", todo="name one that has a tokenizer.json")
        why = f"it has none of {', '.join(FILES)}"
        if any((folder / name).is_file() for name in FILES):
            options = {"local_files_only": True, "trust_remote_code": False}
            try:
                self.inner: Any = transformers.AutoTokenizer.from_pretrained(str(folder), **options)
                why = "" if self.encode("a") else "it gives no token for a text"
            except faults_of_values() as error:
                _check_files(folder)
                why = in_a_line(error)
        if why:
            todo = "copy the tokenizer of the model there, or name another folder"
            raise ConfigError(f"{folder} has no tokenizer that can be read", why=why, todo=todo)
        self.folder, self.vocab_size = folder, len(self.inner)
        added = self.inner.added_tokens_decoder.values()
        names = [re.escape(token.content) for token in added if token.special]
        self.controls = re.compile("|".join(names) or "$^")  # what is never text
        self.start: int | None = self.inner.bos_token_id
        self.end: int | None = self.inner.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        ids: list[int] = self.inner.encode(text, add_special_tokens=False)
        return ids

    def encode_whole(self, text: str, longest: int) -> tuple[list[int], bool]:
        """Encode a text with the special tokens of the model, and return True if it is cut to `longest`."""
        ids: list[int] = self.inner(text, verbose=False)["input_ids"]
        if len(ids) <= longest:
            return ids, False
        return self.inner(text, truncation=True, max_length=longest)["input_ids"], True

    def encode_words(self, words: Sequence[str], longest: int) -> tuple[list[int], list[int | None]]:
        """Encode words with blanks between them as a whole; return the place of the last token of each.

        None for a word that is cut. Raises DataError for a word without a token, ConfigError for a tokenizer
        that does not tell which text its tokens are of.
        """
        if not self.inner.is_fast:
            todo = "give the folder a tokenizer.json"
            raise ConfigError(f"the tokenizer in {self.folder} does not tell words apart", todo=todo)
        starts = [0, *accumulate(len(word) + 1 for word in words[:-1])]
        options = {"return_offsets_mapping": True, "verbose": False, "max_length": longest}
        whole, cut = (self.inner(" ".join(words), truncation=cuts, **options) for cuts in (False, True))
        whole_T, cut_T = (
            [_word_of(start, stop, starts, words) for start, stop in each["offset_mapping"]]
            for each in (whole, cut)
        )
        numbers, all_of, kept = range(len(words)), Counter(whole_T), Counter(cut_T)
        if missing := [words[number] for number in numbers if not all_of[number]]:
            raise DataError(f"the tokenizer has no token for {missing[0]!r}", todo="leave the word out")
        last = {number: place for place, number in enumerate(cut_T)}
        return cut["input_ids"], [last[n] if kept[n] == all_of[n] else None for n in numbers]

    def check_rows(self, block_size: int) -> int:
        """Return the id of padding: where there is none, that of the end of a text.

        Raises ConfigError where whole texts cannot be rows of `block_size` tokens as the model expects them.
        """
        least, most = self.inner.num_special_tokens_to_add() + 1, self.inner.model_max_length
        if not least <= block_size <= most:
            bound = f"at most {most} (model_max_length)" if block_size > most else f"at least {least}"
            todo = f"set CONFIG_BLOCK_SIZE={min(block_size, most) if block_size > most else least}"
            what = f"CONFIG_BLOCK_SIZE={block_size} is not for the tokenizer in {self.folder}"
            raise ConfigError(what, why=f"a text has {bound} tokens", todo=todo)
        if any(self.inner("a").get("token_type_ids", ())):
            why = "it gives tokens of a single text types, which are not passed to the model"
            raise ConfigError(f"the tokenizer in {self.folder} cannot be used", why=why, todo="use another")
        pad = self.inner.pad_token_id
        pad = self.end if pad is None else pad
        if pad is None:
            todo = "name its pad_token in tokenizer_config.json"
            raise ConfigError(f"the tokenizer in {self.folder} has no token of padding", todo=todo)
        return int(pad)

    def encode_all(self, content: bytes) -> Tokens:
        """Encode a whole file. Raises UnicodeDecodeError if it is not UTF-8."""
        return np.array(self.encode(content.decode()), np.uint32)

    def decode(self, tokens: npt.ArrayLike) -> str:
        """Decode tokens, special ones by their names."""
        text: str = self.inner.decode(np.asarray(tokens).tolist(), clean_up_tokenization_spaces=False)
        return text

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Return the bytes of each token decoded alone; a part of a character counts as its replacement."""
        return np.array([len(self.decode([token]).encode()) for token in range(self.vocab_size)], np.int64)

    def to_json(self) -> dict[str, Any]:
        """Return its name and folder."""
        return {"name": self.name, "folder": str(self.folder)}


def _check_files(folder: Path) -> None:
    """Raise ConfigError for a file in `folder`, from which no tokenizer can be made, that is the reason."""
    for file in sorted(folder.glob("*.json")):
        try:
            with os_errors("read"):
                json.loads(file.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{file} is not JSON", why=str(error), todo=AGAIN) from error
    if (folder / "config.json").is_file():  # transformers reads it for the class of a tokenizer
        read_configuration(folder)


def _word_of(start: int, stop: int, starts: Sequence[int], words: Sequence[str]) -> int:
    """Return the number of the word that a token is of, by characters; -1 for blanks and special tokens."""
    number = bisect_right(starts, stop - 1) - 1
    return number if stop > start < starts[number] + len(words[number]) else -1
