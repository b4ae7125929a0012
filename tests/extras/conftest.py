"""Warnings of other packages are theirs, and tests that use transformers change no others."""

import pytest

import models.huggingface.library  # noqa: F401  tells torch its functions before transformers replaces some


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))
