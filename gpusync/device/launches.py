"""Launches, one function per step: which kernels, over which tables, with what grid.

Every function queues on the stream that it is given and returns at once; none allocates, none synchronises. Tables are
device addresses; what is in them, and who may write where, stands at the top of the kernel sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpusync.device.kernels import TILE_NBYTES
from gpusync.device.runtime import Stream

THREADS = 256

BLOCKS_PER_TILE = 64
"""XXH3 blocks of 1024 bytes in a tile."""

SUMS_NBYTES = BLOCKS_PER_TILE * 64
COUNTS_NBYTES = TILE_NBYTES // 64
ROWS_NBYTES = BLOCKS_PER_TILE * 2
CHECKS_NBYTES = 16
"""Bytes per tile of the tables of those names."""

_GROUP_TILES = 64
_CHAIN_THREADS = 32


@dataclass(frozen=True)
class Tiles:
    """A batch's chunks and tiles. ``gate`` is the address of the flag that stops what follows a failure."""

    chunks: int
    nchunks: int
    tile_chunk: int
    ntiles: int
    gate: int


@dataclass(frozen=True)
class CountTables:
    """Where counting leaves its results.

    Per tile: counts u8[1024] by segment, rows u16[64] prefixes, totals u32; groups u32 per 64 tiles; firsts
    u32[ntiles + 1], the place of each tile's first entry, the batch's number of entries last.
    """

    counts: int
    rows: int
    totals: int
    groups: int
    firsts: int


@dataclass(frozen=True)
class Entries:
    """A change list: ``index`` and ``value`` u16 each, and where each tile's entries begin."""

    firsts: int
    index: int
    value: int


@dataclass(frozen=True)
class Lists:
    """All change lists of an update: ``LIST`` rows, and the row of each of their tiles."""

    rows: int
    tile_list: int
    ntiles: int


def launch_digest(
    stream: Stream, tiles: Tiles, *, sums: int, checks: int, states: int, digests: int
) -> None:
    """Digest (live XOR delta) of a batch; regions that end in it get their digest.

    Parameters
    ----------
    sums
        Scratch, u64[ntiles * 64 * 8].
    checks
        u64[ntiles * 2], zeroed: per tile the order-free sums over entries of (index, new XOR live) and (index, live).
    states
        u64[regions * 8], carried from batch to batch.
    digests
        u64[regions * 2]: low and high half of XXH3-128.
    """
    stream.launch(
        "gs_digest_sums",
        tiles.ntiles,
        (tiles.chunks, tiles.tile_chunk, tiles.ntiles, sums, checks, tiles.gate),
    )
    # Bound by latency, one chunk per eight threads: small blocks spread them over the device.
    stream.launch(
        "gs_digest_chain",
        -(-tiles.nchunks * 8 // _CHAIN_THREADS),
        (tiles.chunks, tiles.nchunks, sums, states, tiles.gate),
        threads=_CHAIN_THREADS,
    )
    stream.launch(
        "gs_digest_finish",
        _blocks(tiles.nchunks),
        (tiles.chunks, tiles.nchunks, states, digests, tiles.gate),
    )


def launch_count(stream: Stream, tiles: Tiles, tables: CountTables) -> None:
    """Count a batch's entries, and place each tile's."""
    ntiles = tiles.ntiles
    stream.launch(
        "gs_count", ntiles * 4, (tiles.chunks, tiles.tile_chunk, ntiles, tables.counts, tiles.gate)
    )
    stream.launch(
        "gs_rows",
        _blocks(ntiles),
        (tables.counts, ntiles, tables.rows, tables.totals, tiles.gate),
    )
    groups = -(-ntiles // _GROUP_TILES)
    stream.launch("gs_groups", _blocks(groups), (tables.totals, ntiles, tables.groups))
    stream.launch(
        "gs_firsts", _blocks(groups), (tables.totals, tables.groups, ntiles, tables.firsts)
    )


def launch_write(stream: Stream, tiles: Tiles, tables: CountTables, entries: Entries) -> None:
    """Write the entries that were counted, in increasing order within each tile."""
    stream.launch(
        "gs_write",
        tiles.ntiles * 4,
        (
            tiles.chunks,
            tiles.tile_chunk,
            tiles.ntiles,
            tables.counts,
            tables.rows,
            entries.firsts,
            entries.index,
            entries.value,
            tiles.gate,
        ),
    )


def launch_list_check(
    stream: Stream, tiles: Tiles, entries: Entries, *, sums: int, checks: int, differs: int
) -> None:
    """Set the u32 at ``differs`` to 1 where a tile's entries do not add up to what the digest pass took.

    ``sums`` is scratch, u64[ntiles], zeroed.
    """
    stream.launch(
        "gs_list_sums",
        tiles.ntiles,
        (tiles.ntiles, entries.firsts, entries.index, entries.value, sums),
    )
    stream.launch("gs_compare", _blocks(tiles.ntiles), (sums, 1, checks, 2, tiles.ntiles, differs))


def launch_live_check(stream: Stream, lists: Lists, *, sums: int, differs: int) -> None:
    """Set the u32 at ``differs`` to 1 where the live words under a tile's entries are not those that were digested.

    ``sums`` u64[ntiles], zeroed, gets what the words add up to now.
    """
    stream.launch("gs_live_sums", lists.ntiles, (lists.rows, lists.tile_list, lists.ntiles, sums))
    stream.launch(
        "gs_compare_live",
        _blocks(lists.ntiles),
        (lists.rows, lists.tile_list, lists.ntiles, sums, differs),
    )


def launch_store(stream: Stream, lists: Lists) -> None:
    """XOR all entries into the live words; a second time takes it back."""
    stream.launch("gs_store", lists.ntiles, (lists.rows, lists.tile_list, lists.ntiles))


def load_commit_kernels(stream: Stream) -> None:
    """Have commit's kernels loaded: CUDA does that when one is first asked for, which is not for the pause."""
    for kernel in ("gs_live_sums", "gs_compare_live", "gs_store"):
        stream.launch(kernel, 0, ())


def launch_layers(
    stream: Stream, tiles: Tiles, *, layers: int, tile_layer: int, ntiles: int
) -> None:
    """Make decoded or plain tensor bytes part of their chunks' deltas.

    Parameters
    ----------
    layers, tile_layer, ntiles
        ``LAYER`` rows, one per chunk at most, and the row of each tile of their chunks.
    """
    stream.launch("gs_layers", ntiles, (layers, tile_layer, ntiles, tiles.chunks, tiles.gate))


def launch_payloads(
    stream: Stream, tiles: Tiles, *, payloads: int, item_payload: int, nitems: int, bad: int
) -> None:
    """Judge sparse payloads, then apply them to their chunks' deltas.

    Parameters
    ----------
    payloads, item_payload, nitems
        ``PAYLOAD`` rows, and the row of each item of 4096 entries.
    bad
        u32 per tensor: 2 is added where a payload breaks a rule, and the gate is shut.
    """
    stream.launch("gs_payload_check", nitems, (payloads, item_payload, nitems, bad, tiles.gate))
    stream.launch(
        "gs_payload_apply", nitems, (payloads, item_payload, nitems, tiles.chunks, tiles.gate)
    )


def launch_records(stream: Stream, tiles: Tiles, *, records: int, nrecords: int, bad: int) -> None:
    """Judge records of xor_rows, then apply them to their chunks' deltas.

    Parameters
    ----------
    records, nrecords
        ``RECORD`` rows.
    bad
        u32 per tensor: 2 is added where a record breaks a rule, and the gate is shut.
    """
    stream.launch("gs_record_check", nrecords, (records, nrecords, bad, tiles.gate))
    stream.launch("gs_record_apply", nrecords, (records, nrecords, tiles.chunks, tiles.gate))


def launch_status_check(
    stream: Stream,
    *,
    statuses: int,
    actual: int,
    expected: int,
    frame_tensor: int,
    nframes: int,
    bad: int,
    gate: int,
) -> None:
    """Shut the gate where nvCOMP reports a status or a size other than the expected one, and mark the tensor 1."""
    stream.launch(
        "gs_check_statuses",
        _blocks(nframes),
        (statuses, actual, expected, frame_tensor, nframes, bad, gate),
    )


def launch_fill_guards(stream: Stream, zones: int, nzones: int) -> None:
    """Fill guard zones of 256 bytes, whose addresses are in the table ``zones``."""
    stream.launch("gs_fill_guards", nzones, (zones, nzones))


def launch_check_guards(stream: Stream, zones: int, nzones: int, damaged: int) -> None:
    """Set the u32 at ``damaged`` to 1 where a zone is not as it was filled."""
    stream.launch("gs_check_guards", nzones, (zones, nzones, damaged))


def _blocks(threads: int) -> int:
    return -(-threads // THREADS)
