"""The numbers of RFC 8878: each must follow from the others."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gpusync.format.zstd import rfc8878


@pytest.mark.parametrize(
    ("baselines", "extra_bits", "least", "most"),
    [
        (
            rfc8878.LITERAL_LENGTH_BASELINES,
            rfc8878.LITERAL_LENGTH_EXTRA_BITS,
            0,
            (128 << 10) - 1,
        ),
        (
            rfc8878.MATCH_LENGTH_BASELINES,
            rfc8878.MATCH_LENGTH_EXTRA_BITS,
            3,
            (128 << 10) + 2,
        ),
    ],
)
def test_each_code_begins_where_the_one_before_it_ends(
    baselines: NDArray[np.uint64], extra_bits: NDArray[np.uint64], least: int, most: int
) -> None:
    ends = baselines + (np.uint64(1) << extra_bits)
    assert baselines[0] == least
    assert np.array_equal(baselines[1:], ends[:-1])
    assert ends[-1] - 1 == most


@pytest.mark.parametrize(
    ("distribution", "log", "codes"),
    [
        (rfc8878.DEFAULT_LITERAL_LENGTHS, rfc8878.DEFAULT_LITERAL_LENGTHS_LOG, 36),
        (rfc8878.DEFAULT_MATCH_LENGTHS, rfc8878.DEFAULT_MATCH_LENGTHS_LOG, 53),
        (rfc8878.DEFAULT_OFFSETS, rfc8878.DEFAULT_OFFSETS_LOG, 29),
    ],
)
def test_a_default_distribution_fills_its_table(
    distribution: NDArray[np.int64], log: int, codes: int
) -> None:
    assert distribution.size == codes
    assert np.abs(distribution).sum() == 1 << log
