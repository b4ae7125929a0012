"""The tree speaks the field's language: no word of our own where PyTorch, SLURM or Kconfig has one.

Identifiers, docstrings, comments and messages of the product, help of the options and documents.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.contract.house_rules import Module, modules_under
from tests.support.configs import ROOT

PRODUCT = ("anneal", "lib", "models", "train", "scripts")
# Word of our own -> the field's, as regular expressions over lower-case text.
TEXT = {
    r"(?<!and )\b(goes|go|going|gone|went) on\b(?! and on)": "resume, continue",
    r"\bgatherings?\b": "rendezvous",
    r"\b(newest|latest|is|no longer|still) sound\b|\bsound (checkpoint|copy|copies|file)": "valid",
    r"\bin parts\b": "sharded",
    r"\bput together\b": "gathered",
    r"\bhonou?r(s|ed|ing)?\b": "meet, obey, be possible",
    r"\btold\b": "reported, logged",
    r"\blast words\b": "run summary",
    r"\bways to spread\b|\bways to share\b": "parallelism strategies",
    r"\bunopened\b": "metadata",
    r"\bfloors\b": "n-gram baseline",
    r"\bsharers?\b": "replicas, data-parallel ranks",
    r"\bhungriest\b": "peak",
    r"\bcrew\b": "concurrency",
    r"\bshortage\b": "oom, out of memory",
    r"\bshared out\b": "sharded",
    r"\bstage 0\b": "pretraining of the frozen models",
    r"\bin turn\b": "interleaved",
    r"\bchips?\b": "accelerators",
    r"\bfootprints?\b": "memory trace",
    r"\bplaces? to meet\b": "rendezvous endpoint",
    r"\bmachines (that )?train together\b": "nodes",
    r"\bof processor\b|\bthe processors?\b": "CPU",
    r"\bassumed (hardware|machine)": "named hardware",
    r"\w\(s\)": "lib.units.counted",
    r"\bthe lock brings\b": "requirements.lock installs",
    r"\btrials of a micro-batch\b": "probe runs",
    r"\bwhere (figures go|machines meet)\b": "Logging, Rendezvous endpoint",
}
ANY_OF_TEXT = re.compile("|".join(TEXT))
# Parts of identifiers, between underscores and capitals.
NAMES = {
    "asked": "requested",
    "chip": "accelerator",
    "crew": "concurrency",
    "floors": "baseline",
    "footprint": "memory trace",
    "footprints": "memory traces",
    "gathering": "rendezvous",
    "hungriest": "peak",
    "owes": "pending",
    "remarking": "has note",
    "say": "log",
    "said": "logged",
    "settling": "converging",
    "sharers": "replicas",
    "shortage": "oom",
    "situation": "context",
    "stepwise": "per iteration",
    "tell": "log, report",
    "told": "format, report",
    "unopened": "metadata",
}
# (path, part of the line): the word is meant plainly there.
PLAIN: set[tuple[str, str]] = {
    ("train/preflight/command.py", '"told"'),  # a key of JSON
}
FOREIGN_NAMES = {"tell"}  # of file objects, and of Optuna's studies

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "Makefile", "scripts/targets", "Kconfig.legacy")
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


@pytest.mark.slow
def test_every_text_is_in_the_words_of_the_field() -> None:
    assert [*_breaches(_lines())] == []


@pytest.mark.slow
def test_every_name_is_in_the_words_of_the_field() -> None:
    found = {
        f"{module.path}: {name}: {NAMES[part]}"
        for module in _product()
        for name in names_of(module)
        for part in parts_of(name)
        if part in NAMES and name not in FOREIGN_NAMES
    }
    assert sorted(found) == []


@pytest.mark.slow
def test_no_exception_is_left_over() -> None:
    assert [
        each for each in PLAIN if not any(each[0] == path and each[1] in line for path, _, line in _lines())
    ] == []


@pytest.mark.parametrize(
    "line",
    [
        "it goes on from the checkpoint",
        "the newest sound checkpoint",
        "Told once",
        "seconds of processor",
        "a gathering",
        "2 device(s)",
    ],
)
def test_a_word_of_our_own_is_found(line: str) -> None:
    assert [*_breaches([("lib/x.py", 1, line)])]


def test_a_name_of_our_own_is_found() -> None:
    (name,) = {name for name in names_in("def f():\n    toldMemory = 1\n") if name != "f"}
    assert "told" in parts_of(name) and parts_of("NgramFloors") == ["ngram", "floors"]
    assert "f" in names_in("def f(): ...") and "say" in names_in("f(say=1)")


@pytest.mark.slow
def test_what_is_public_has_a_docstring_in_the_form_of_the_field() -> None:
    found = [breach for module in _product() for breach in docstring_breaches(module)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(): ...",
        "class A: ...",
        "class A:\n    'A class.'\n    def f(self): ...",
        "def f():\n    '''What it does.'''",
        "def f():\n    '''Whether it is.'''",
    ],
)
def test_a_missing_docstring_is_found(text: str) -> None:
    assert [*docstring_breaches(Module("lib/x.py", text))]


def test_what_is_private_or_overrides_needs_no_docstring() -> None:
    text = """
class A(nn.Module):
    '''A layer.'''
    def forward(self, x): ...
    def __init__(self): ...
    def _f(self): ...
def _g(): ...
def h():
    '''Return nothing.'''
    def inner(): ...
"""
    assert [*docstring_breaches(Module("lib/x.py", text))] == []


def docstring_breaches(module: Module) -> Iterator[str]:
    """Public functions, classes and methods without a docstring, or with one that begins as a riddle."""
    for owner, node in _public(module.tree.body, ""):
        text = ast.get_docstring(node)
        where = f"{module.path}:{node.lineno} {owner}{node.name}"
        if text is None:
            yield f"{where} has no docstring"
        elif re.match(r"(What|Of|Whether|How|Where|Who|Which|When)\b", text):
            yield f"{where} begins with {text.split()[0]}"


def names_of(module: Module) -> set[str]:
    """Return all names that a program defines or passes by keyword."""
    found: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def names_in(text: str) -> set[str]:
    return names_of(Module("lib/x.py", text))


def parts_of(name: str) -> list[str]:
    """Return the words of an identifier in lower case."""
    return [part.lower() for part in _PART.findall(name)]


def _public(
    body: list[ast.stmt], owner: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    overrides = {"forward", "backward", "setup_context"}  # torch calls them; their class says what they do
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_") or (owner and node.name in overrides):
            continue
        if any(
            "overload" in ast.unparse(each) or "setter" in ast.unparse(each) for each in node.decorator_list
        ):
            continue
        yield owner, node
        if isinstance(node, ast.ClassDef):
            yield from _public(node.body, f"{node.name}.")


def _breaches(lines: object) -> Iterator[str]:
    for path, number, line in lines:  # type: ignore[attr-defined]
        if any(path == file and part in line for file, part in PLAIN):
            continue
        for pattern, instead in TEXT.items() if ANY_OF_TEXT.search(line.lower()) else ():
            if found := re.search(pattern, line.lower()):
                yield f"{path}:{number}: '{found[0]}': {instead}: {line.strip()[:80]}"


@functools.cache
def _lines() -> list[tuple[str, int, str]]:
    """(path, line number, text): comments and strings of files with words of TEXT, and lines of documents."""
    return [*_read_lines()]


def _read_lines() -> Iterator[tuple[str, int, str]]:
    for module in _product():
        path, text = module.path, module.text
        if not ANY_OF_TEXT.search(text.lower()):
            continue  # to tokenize it takes most of the time
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                for offset, line in enumerate(token.string.splitlines()):
                    yield path, token.start[0] + offset, line
    documents = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in DOCUMENTS)]
    for room in (*PRODUCT, "defconfigs"):
        documents += (
            each
            for each in (ROOT / room).rglob("*")
            if each.name.startswith("Kconfig") or room == "defconfigs"
        )
    for document in sorted({*documents, ROOT / "Kconfig"}):
        if document.is_file():
            for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
                yield str(document.relative_to(ROOT)), number, line


@functools.cache
def _product() -> tuple[Module, ...]:
    return tuple(modules_under(ROOT, *PRODUCT))
