"""Attention of packed documents is that of each document alone."""

from __future__ import annotations

import pytest
import torch

from lib.nn.attention import causal_attention, same_document

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, -1, -1], [0, 0, 0, 0, 0, 0, 0, 0]])


def test_tokens_see_their_own_document_up_to_themselves() -> None:
    seen, places = same_document(DOCUMENTS)
    assert places.tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [*range(8)]]
    for row, documents in enumerate(DOCUMENTS.tolist()):
        for at, document in enumerate(documents):
            expected = [other <= at and documents[other] == document for other in range(8)]
            assert seen[row, at].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_documents_that_share_a_row_attend_as_alone(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 8, 4, generator=random, dtype=torch.float64).to(dtype) for _ in range(3))
    packed = causal_attention(q, k, v, same_document(DOCUMENTS)[0])
    assert packed.dtype == dtype
    tolerance = {"rtol": 0.0, "atol": 1e-12 if dtype == torch.float64 else 0.02}
    for row, documents in enumerate(DOCUMENTS):
        for document in documents.unique():
            own = documents == document
            alone = causal_attention(*(each[row : row + 1, :, own] for each in (q, k, v)))
            torch.testing.assert_close(packed[row : row + 1, :, own], alone, **tolerance)
