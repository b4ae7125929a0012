"""State that is sharded over ranks is put together as one process has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.distributed.fsdp import Entries, Gatherer, Rows, gather_full


class Ranks(Gatherer):
    """Rank 0 of several, whose others have `shards` and `entries`."""

    def __init__(self, shards: list[Tensor], entries: list[Mapping[Any, Any]]) -> None:
        super().__init__(rank=0)
        self.ranks = len(shards) + 1
        self._shards, self._entries = shards, entries

    def gather(self, tensor: Tensor) -> list[Tensor]:
        padded = [torch.full_like(tensor, math.nan) for _ in self._shards]  # what is sent beyond a shard
        for whole, own in zip(padded, self._shards, strict=True):
            whole[: len(own)] = own
        return [tensor, *padded]

    def gather_entries(self, entries: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
        return [entries, *self._entries]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7])
def test_rows_that_ranks_share_unevenly_are_those_of_the_whole_tensor(rows: int) -> None:
    whole = torch.arange(rows * 2.0).view(rows, 2)
    own, *others = torch.split(whole, math.ceil(rows / 3))
    others += [whole[:0]] * (2 - len(others))  # ranks without a row
    found = gather_full({"weight": [Rows(own, (rows, 2))]}, Ranks(others, [{}, {}]))
    assert torch.equal(found["weight"][0], whole)


def test_entries_of_all_ranks_come_in_the_order_of_one_process() -> None:
    gatherer = Ranks([torch.zeros(0)] * 2, [{1: "b", 4: "e"}, {0: "a", 3: "d"}])
    found = gather_full({"state": Entries({2: "c"}), "step": 7}, gatherer)
    assert list(found["state"].items()) == list(enumerate("abcde")) and found["step"] == 7
