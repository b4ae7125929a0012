"""make fetch without a hub: what it refuses. tests/extras/test_fetch.py has a hub on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lib.errors import ConfigError
from scripts import fetch


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "REPO= is no repository; give REPO=owner/name"),
        (["--repo=a/b/c"], "REPO=a/b/c is no repository; give REPO=owner/name"),
        (["--repo=me/tiny"], "DIRECTORY= is not given; name a new folder for the files"),
        (["--repo=me/tiny", "--directory=."], "DIRECTORY=. exists; name a new folder"),
        (["--repo=me/tiny", "--directory=new"], "the package huggingface_hub is needed here: "),
    ],
)
def test_what_is_refused(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fetch", *words])
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as where it is not installed
    with pytest.raises(ConfigError) as raised:
        fetch.main()
    assert str(raised.value).startswith(message)
    if "huggingface_hub" in message:
        assert "pip install huggingface_hub" in str(raised.value)
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        (None, "unknown"),
        ({"license": None}, "unknown"),
        ({"license": "apache-2.0"}, "apache-2.0"),
        ({"license": ["mit", "gpl-3.0"]}, "mit-gpl-3.0"),
        ({"license": "other", "license_name": "llama community"}, "llama-community"),
        ({"license": "mit\nbase_model: mine \x1b[2J"}, "mit-base_model-mine-2J"),  # of a stranger
    ],
)
def test_a_licence_is_one_word(card: dict[str, object] | None, licence: str) -> None:
    assert fetch._licence(card and SimpleNamespace(**card)) == licence
