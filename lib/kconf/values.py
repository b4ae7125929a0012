"""Machine-read lines in the help of a symbol: `Value:` and `Neutral:`.

Kconfig has no float, list or path type. A line in the help text adds one to a string symbol:

    Value: float, 0 < x <= 10        Value: int list, rising, 1 <= x <= 99
    Value: float                     Value: path
    Value: float list, x >= 0        Value: text

Lists are comma-separated without spaces; in a rising one each element exceeds the previous one. A path is not
empty; a text may be.

A line `Neutral: n` in the help of any symbol (for a choice, of the string that names its member) gives the
value, as in .config, at which training behaves as if the option did not exist. A new option with that value
as its default leaves the identity of every run unchanged. `Neutral: n unless SYMBOL` holds where SYMBOL is
not set: where it is, runs could set the option already, and have it in their identity.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

Value: TypeAlias = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | None

_INT = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
_FLOAT = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NUMBER = r"(-?[0-9.]+(?:[eE][-+]?[0-9]+)?)"
_INTERVAL = rf"(?:{_NUMBER} (<=?) )?x(?: (<=?) {_NUMBER})?"
_RULE = re.compile(rf"(?:(path|text)|(float|int)( list(, rising)?)?(?:, {_INTERVAL}|, x (>=?) {_NUMBER})?)")
_VALUE_LINE = re.compile(r"^\s*Value: *(.*?)\s*$", re.MULTILINE)
_NEUTRAL_LINE = re.compile(r"^\s*Neutral: *(.*?)(?: unless (\w+))?\s*$", re.MULTILINE)


def is_plain_int(text: str) -> bool:
    """True if `text` is a decimal integer in its one spelling: no +, _ or leading zero, at most 19 digits."""
    return _INT.fullmatch(text) is not None and text != "-0"


@dataclass(frozen=True, slots=True)
class ValueRule:
    """Rule of a `Value:` line. `text` is the line itself, without `Value: `."""

    text: str
    kind: str  # float, int, path or text
    is_list: bool = False
    is_rising: bool = False
    low: float = -math.inf  # both included
    high: float = math.inf

    def parse(self, text: str) -> Value:
        """Parse `text` into a typed value. Raises ValueError saying what is wrong with it."""
        if self.kind == "text":
            return text
        if self.kind == "path":
            if not text:
                raise ValueError("is empty (Value: path)")
            return text
        if not self.is_list:
            return self._number(text)
        items = text.split(",")
        numbers = tuple(self._number(item) for item in items)
        if self.is_rising:
            for before, after in pairwise(items):
                if self._number(before) >= self._number(after):
                    raise ValueError(f"has the element '{after}' after '{before}' (Value: {self.text})")
        return numbers

    def _number(self, text: str) -> int | float:
        subject = f"has the element '{text}' that " if self.is_list else ""
        rule = f"(Value: {self.text})"
        if self.kind == "int":
            if not is_plain_int(text):
                raise ValueError(f"{subject}is not a plain decimal number {rule}")
            number: int | float = int(text)
        else:
            if not _FLOAT.fullmatch(text):
                raise ValueError(f"{subject}is not a number {rule}")
            number = float(text) + 0.0  # no negative zero
            digits = re.split("[eE]", text)[0]
            if math.isinf(number) or (number == 0 and re.search("[1-9]", digits)):
                raise ValueError(f"{subject}is beyond what a float can hold {rule}")
        if not self.low <= number <= self.high:
            raise ValueError(f"{subject}is out of range {rule}")
        return number


def parse_rule(text: str) -> ValueRule:
    """Parse the text after `Value: `. Raises ValueError where it is not in the grammar above."""
    match = _RULE.fullmatch(text)
    if match is None:
        raise ValueError(f"'Value: {text}' is not understood")
    word, number, is_list, is_rising, low, low_sign, high_sign, high, only_low_sign, only_low = match.groups()
    if word:
        return ValueRule(text, word)
    if only_low_sign:
        low, low_sign = only_low, only_low_sign
    bounds = []
    for bound, sign, outwards in ((low, low_sign, -math.inf), (high, high_sign, math.inf)):
        included = float(bound) if bound else outwards
        # An excluded bound is the next float inwards.
        bounds.append(math.nextafter(included, -outwards) if sign in ("<", ">") else included)
    return ValueRule(text, number, bool(is_list), bool(is_rising), *bounds)


def value_line(symbol: Any) -> str | None:
    """Return the text after `Value: ` in the help of a kconfiglib symbol, from any of its definitions."""
    match = _find_in_help(symbol, _VALUE_LINE)
    return match and match[1]


def neutral_line(symbol: Any) -> str | None:
    """Return the value after `Neutral: `, without quotes; None where no value is neutral."""
    match = _find_in_help(symbol, _NEUTRAL_LINE)
    if match is None or (match[2] and symbol.kconfig.syms[match[2]].tri_value):
        return None
    return match[1].strip('"')


def help_text(node: Any) -> str:
    """Return the help of a menu entry in one line, without the lines for programs."""
    lines = (node.help or "").splitlines()
    kept = (one for one in lines if not (_VALUE_LINE.match(one) or _NEUTRAL_LINE.match(one)))
    return " ".join(" ".join(kept).split())


def _find_in_help(symbol: Any, form: re.Pattern[str]) -> re.Match[str] | None:
    return next((match for node in symbol.nodes if (match := form.search(node.help or ""))), None)


def rule_of(symbol: Any) -> ValueRule | None:
    """Return the rule of a string symbol; None without a `Value:` line or where it is ordinary prose."""
    text = value_line(symbol)
    if text is None:
        return None
    try:
        return parse_rule(text)
    except ValueError:
        # A foreign tree may have prose that starts like this; in our own tree lint rejects it.
        return None
