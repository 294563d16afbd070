"""Slices of a tensor on several ranks: their shares make the digest of the whole, or say what is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpusync.errors import DigestMismatchError, GpuSyncError, OutOfScratchError
from gpusync.ranks.sharefile import ShareFile
from gpusync.ranks.shares import (
    Agreement,
    Extent,
    Offer,
    agree,
    pack_offers,
    unpack_offers,
    why_not_added,
)
from gpusync.ranks.tally import Tally, plan_swaps

Bytes = NDArray[np.uint8]


def data_of(nbytes: int, seed: int = 0) -> Bytes:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


def digest_of(data: Bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data.tobytes())


# ---- ranks ------------------------------------------------------------------------------------------------


@dataclass
class Wire:
    """What ranks in threads of one process swap through, and the largest buffers that they did it with."""

    size: int
    most_nbytes: int = 0
    swaps: int = 0
    sent: dict[int, list[Bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=30)


@dataclass
class Line:
    """One rank's end of a wire, as :class:`gpusync.ranks.channel.Channel`."""

    wire: Wire
    rank: int

    @property
    def size(self) -> int:
        return self.wire.size

    def swap(
        self, outgoing: Bytes, to_each: Sequence[int], incoming: Bytes, from_each: Sequence[int]
    ) -> None:
        wire = self.wire
        wire.most_nbytes = max(wire.most_nbytes, outgoing.size, incoming.size)
        assert outgoing.size == sum(to_each)
        assert incoming.size == sum(from_each)
        wire.sent[self.rank] = np.split(outgoing, np.cumsum(to_each)[:-1])
        wire.barrier.wait()
        got = [wire.sent[rank][self.rank] for rank in range(self.size)]
        assert [part.size for part in got] == list(from_each)
        incoming[:] = np.concatenate(got)
        wire.swaps += self.rank == 0
        wire.barrier.wait()


Held = Mapping[str, tuple[Extent, ...]]


def offered(held: Sequence[Held], tensors: Mapping[str, Bytes]) -> list[dict[str, Offer]]:
    """Return every rank's offers, as the others get them."""
    return [
        unpack_offers(
            pack_offers(
                {
                    name: Offer(tensors[name].size, digest_of(tensors[name]), 7, extents)
                    for name, extents in mine.items()
                }
            )
        )
        for mine in held
    ]


def tally(
    held: Sequence[Held],
    tensors: Mapping[str, Bytes],
    bend: Callable[[int, str, int, Bytes], None] = lambda rank, name, number, new: None,
    piece: int = 4096,
    cap: int = 1 << 20,
) -> tuple[list[GpuSyncError | None], Wire]:
    """Have ranks prove what they hold; return the error of each. ``bend`` changes the new bytes of one slice."""
    offers = offered(held, tensors)
    agreement = agree(offers)
    assert not agreement.reasons
    wire = Wire(len(held))

    def rank_of(rank: int) -> GpuSyncError | None:
        file = ShareFile(offers[rank])
        for name, offer in offers[rank].items():
            for number, writer in enumerate(file.writers(name)):
                extent = offer.extents[number]
                new = tensors[name][extent.positions(0, extent.nbytes)]
                bend(rank, name, number, new)
                for offset in range(0, offer.nbytes, piece):
                    begin, end = extent.before(offset), extent.before(offset + piece)
                    if begin < end:
                        writer.write(begin, new[begin:end])
                writer.finish()
        try:
            Tally(Line(wire, rank), file, cap).run(agreement.tensors)  # type: ignore[arg-type]
        except GpuSyncError as err:
            return err
        finally:
            file.close()
        return None

    with ThreadPoolExecutor(len(held)) as pool:
        return list(pool.map(rank_of, range(len(held)))), wire


def rows(nbytes: int, ranks: int) -> list[Held]:
    """Shares of rows, uneven where they must be, on 16-byte borders."""
    per = -(-nbytes // ranks // 16) * 16 or 16
    found: list[Held] = []
    for rank in range(ranks):
        begin, end = min(rank * per, nbytes), min((rank + 1) * per, nbytes)
        found.append({"t": (Extent(begin, end - begin, 1, end - begin),)} if end > begin else {})
    return found


def columns(height: int, width: int, ranks: int) -> list[Held]:
    part = width // ranks
    return [{"t": (Extent(rank * part, part, height, width),)} for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("nbytes", [16, 240, 256, 1024, 1025, 4096, 4100, 70000])
def test_rows(nbytes: int, ranks: int) -> None:
    errors, _ = tally(rows(nbytes, ranks), {"t": data_of(nbytes)})
    assert errors == [None] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [128, 256, 1024, 1536, 8192, 22016])
def test_columns(width: int, ranks: int) -> None:
    errors, _ = tally(columns(23, width, ranks), {"t": data_of(23 * width)}, piece=8192)
    assert errors == [None] * ranks


@pytest.mark.parametrize("cap", [4096, 1 << 16, 1 << 20])
def test_buffers_stay_below_their_cap(cap: int) -> None:
    """Tensors larger than a buffer go in several swaps; small ones share one."""
    held: list[Held] = [
        {
            "large": (Extent(rank * 100_000, 100_000, 1, 100_000),),
            "wide": (Extent(rank * 512, 512, 300, 2048),),
            **{f"small{n}": (Extent(rank * 512, 512, 1, 512),) for n in range(50)},
        }
        for rank in range(4)
    ]
    tensors = {"large": data_of(400_000), "wide": data_of(300 * 2048)}
    tensors |= {f"small{number}": data_of(2048, number) for number in range(50)}
    errors, wire = tally(held, tensors, cap=cap)
    assert errors == [None] * 4
    assert 0 < wire.most_nbytes <= cap
    assert (wire.swaps == 1) == (cap == 1 << 20)


def test_a_rank_sends_a_sixteenth_of_what_it_holds() -> None:
    held = rows(1 << 20, 4)
    _, wire = tally(held, {"t": data_of(1 << 20)})
    assert wire.swaps == 1
    assert wire.most_nbytes <= (1 << 20) // 16 + 1024, "the judge gets one sum per block"
    steps = next(
        iter(plan_swaps(agree(offered(held, {"t": data_of(1 << 20)})).tensors, 4, 1 << 20))
    )
    assert len(steps) == 1


@st.composite
def geometries(draw: st.DrawFn) -> tuple[int, list[Held]]:
    """A tensor cut into rows of blocks, each cut into columns or rows on 16-byte borders, dealt out to ranks with copies."""
    ranks = draw(st.integers(1, 5))
    held: list[list[Extent]] = [[] for _ in range(ranks)]
    begin = 0
    for _ in range(draw(st.integers(1, 3))):
        height = draw(st.integers(1, 40))
        widths = draw(st.lists(st.integers(1, 90).map(lambda n: 16 * n), min_size=1, max_size=4))
        width, column = sum(widths), 0
        for each in widths:
            extent = (
                Extent(begin + column, each, height, width)
                if each < width and height > 1
                else Extent(
                    begin + column,
                    each * (height if each == width else 1),
                    1,
                    each * (height if each == width else 1),
                )
            )
            for rank in draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=3)):
                held[rank].append(extent)
            column += each
        begin += height * width
    rest = draw(st.integers(0, 100))
    if rest:
        held[draw(st.integers(0, ranks - 1))].append(Extent(begin, rest, 1, rest))
    return begin + rest, [{"t": tuple(mine)} if mine else {} for mine in held]


@settings(max_examples=60, deadline=None)
@given(geometries(), st.integers(0, 2**32), st.sampled_from([256, 4096, 1 << 20]))
def test_any_slices_that_are_the_whole_make_its_digest(
    drawn: tuple[int, list[Held]], seed: int, cap: int
) -> None:
    nbytes, held = drawn
    data = data_of(nbytes, seed)
    errors, _ = tally(held, {"t": data}, cap=cap)
    assert errors == [None] * len(held)


@settings(max_examples=60, deadline=None)
@given(geometries(), st.data())
def test_any_wrong_byte_of_any_copy_is_found(
    drawn: tuple[int, list[Held]], data: st.DataObject
) -> None:
    nbytes, held = drawn
    places = [(rank, n) for rank, mine in enumerate(held) for n in range(len(mine.get("t", ())))]
    where = data.draw(st.sampled_from(places))
    at = data.draw(st.integers(0, held[where[0]]["t"][where[1]].nbytes - 1))

    def bend(rank: int, name: str, number: int, new: Bytes) -> None:
        if (rank, number) == where:
            new[at] ^= 1 + at % 255

    errors, _ = tally(held, {"t": data_of(nbytes)}, bend)
    assert [type(error) for error in errors if error is not None] == [DigestMismatchError]


@pytest.mark.parametrize("at", [0, 1023, 1024, 2047, 2048, 2049, 2048 + 15, -1, -64, -65])
def test_a_wrong_byte_in_the_tail_or_the_last_stripe_is_found(at: int) -> None:
    nbytes = 2048 + 32  # the last stripe begins in the last whole block
    where = at % nbytes

    def bend(rank: int, name: str, number: int, new: Bytes) -> None:
        begin = rank * 528
        if begin <= where < begin + new.size:
            new[where - begin] ^= 0x80

    errors, _ = tally(rows(nbytes, 4), {"t": data_of(nbytes)}, bend)
    (error,) = [each for each in errors if each is not None]
    assert isinstance(error, DigestMismatchError)
    assert (error.tensor, error.version) == ("t", 7)


def test_the_judge_may_be_a_rank_that_holds_nothing() -> None:
    held: list[Held] = [{}, *rows(5000, 2)]
    errors, _ = tally(held, {"t": data_of(5000)}, lambda *at: at[3].__setitem__(0, at[3][0] ^ 1))
    assert [error is not None for error in errors] == [True, False, False]


# ---- what is not added up ---------------------------------------------------------------------------------

WHOLE = Extent(0, 4096, 1, 4096)


@pytest.mark.parametrize(
    ("nbytes", "extents", "text"),
    [
        (4096, (WHOLE,), ""),
        (4096, (Extent(0, 2048, 1, 2048), Extent(2048, 2048, 1, 2048)), ""),
        (4100, (WHOLE, Extent(4096, 4, 1, 4)), ""),
        (1000, (Extent(0, 7, 1, 7), Extent(7, 993, 1, 993)), ""),
        (4096, (Extent(0, 2048, 1, 2048),), "not all of it"),
        (4096, (Extent(16, 4080, 1, 4080),), "not all of it"),
        (4096, (Extent(0, 16, 4, 1024), Extent(16, 1008, 3, 1024)), "not all of it"),
        (4096, (WHOLE, Extent(0, 2048, 1, 2048)), "overlap in part"),
        (2048, (WHOLE,), "overlap"),
        (4096, (Extent(0, 2056, 1, 2056), Extent(2056, 2040, 1, 2040)), "within 16 bytes"),
        (4096, (Extent(0, 24, 64, 64), Extent(24, 40, 64, 64)), "within 16 bytes"),
        (4096, (Extent(0, 32, 4, 16), WHOLE), "bytes twice"),
        (1 << 26, (Extent(0, 16, 1 << 20, 32), Extent(16, 16, 1 << 20, 32)), "runs"),
    ],
)
def test_why_slices_are_not_added(nbytes: int, extents: tuple[Extent, ...], text: str) -> None:
    found = why_not_added(nbytes, extents)
    assert text in found
    assert bool(text) == bool(found)


def test_ranks_that_know_a_tensor_differently_do_not_add_it() -> None:
    offers = offered(rows(4096, 2), {"t": data_of(4096)})
    offers[1]["t"] = Offer(4096, "0" * 32, 7, offers[1]["t"].extents)
    found: Agreement = agree(offers)
    assert not found.tensors
    assert "other digests" in found.reasons["t"]


def test_shares_take_room_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpusync.fsio.allocate", full)
    with pytest.raises(OutOfScratchError, match="no room"):
        ShareFile({"t": Offer(4096, "0" * 32, 1, (WHOLE,))})
