"""Bytes between ranks, from the threads that engines call in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import distributed

from gpusync.ranks.channel import Channel, Members

pytestmark = pytest.mark.skipif(
    not distributed.is_gloo_available(), reason="this torch has no gloo"
)


@pytest.mark.parametrize("inference", [False, True])
def test_bytes_are_exchanged_in_and_out_of_inference_mode(inference: bool) -> None:
    """An engine's loop may run in inference mode: tensors made in it are not to be filled outside of it."""
    store = distributed.HashStore()

    def exchange(rank: int) -> tuple[list[bytes], bytes]:
        into = np.zeros(4, np.uint8)
        with (
            torch.inference_mode(inference),
            Channel(Members(store, rank, 2, "test"), 30.0, lambda: None) as channel,
        ):
            gathered = channel.gather(b"rank %d" % rank)
            channel.swap(np.array([rank, rank + 2] * 2, np.uint8), (2, 2), into, (2, 2))
        return gathered, into.tobytes()

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(exchange, range(2)))
    assert answers == [([b"rank 0", b"rank 1"], bytes([0, 2, 1, 3]))] * 2
