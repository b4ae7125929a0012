"""Sentences with labels: what fills them up has no say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib.data.types import TextClassSpec
from tests.models.looped.small import looped

PAD = 0
SENTENCES = TextClassSpec(name="noise", classes=3, vocab_size=11, block_size=8, pad=PAD)


@pytest.mark.parametrize("block", ["energy_cross", "energy_self", "plain"])
def test_padding_changes_nothing(block: str) -> None:
    form: dict[str, Any] = {"input": "text", "block": block, "step_size": 0.9, "tolerance": 1e-12}
    model = looped(spec=SENTENCES, **form, max_iterations=300).double()
    tokens = torch.randint(1, 11, (2, 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        short = model(tokens)
        filled = model(torch.nn.functional.pad(tokens, (0, 3), value=PAD))
        cut = model(torch.nn.functional.pad(tokens[:, :4], (0, 4), value=PAD))
    assert (filled - short).abs().max() <= 1e-9 and (cut - short).abs().max() > 1e-3
