"""Rates: decode by frame size and density; digest, lists, gather and store beside a device copy of the same run."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from gpu_decoding import DecodeBatch, cut_into_frames, cut_sizes
from gpu_lab import GIB, Bytes, Lab, Task, make_delta, name_nbytes
from gpu_regions import ENTRY_NBYTES, Regions

_SECTOR = 32  # bytes that device memory is read and written by


def run_decode_rates(task: Task) -> None:
    """GB/s of decoded bytes for each frame size and density, the whole content in one batch."""
    lab = Lab(task.device)
    sizes = task.sizes
    for density in sizes.densities:
        content = make_delta(sizes.decode_nbytes, density, 21)
        expected = lab.upload(content)
        for frame_nbytes in sizes.frame_nbytes:
            if task.left < 6:
                task.skip(f"frames of {name_nbytes(frame_nbytes)} at {density:.1%}")
                continue
            frames = cut_into_frames(content, frame_nbytes)
            time_frames(task, lab, frames, frame_nbytes, expected, density)
            if density == sizes.densities[0]:
                for batch_nbytes in (n for n in sizes.batch_nbytes if n > 16 * frame_nbytes):
                    few = frames[: batch_nbytes // frame_nbytes]
                    time_frames(task, lab, few, frame_nbytes, expected[:batch_nbytes], density)
        if task.left > 10:
            single = sizes.single_nbytes
            frames = cut_into_frames(content[:single], single)
            time_frames(task, lab, frames, single, expected[:single], density)
        else:
            task.skip(f"a single frame at {density:.1%}")


def time_frames(
    task: Task,
    lab: Lab,
    frames: list[bytes],
    frame_nbytes: int,
    expected: torch.Tensor,
    density: float,
) -> None:
    """Decode one batch, compare every byte, then time it."""
    nbytes = expected.numel()
    batch = DecodeBatch(lab, frames, cut_sizes(nbytes, frame_nbytes))
    name = f"{name_nbytes(frame_nbytes)} frames, batch of {name_nbytes(nbytes)}, {density:.1%}"
    batch.decode()
    right = batch.results().all_good and lab.same(batch.output, expected)
    task.check(f"{name}: bytes", right, "" if right else "not timed")
    if not right:
        return
    timing = lab.measure(batch.decode, task.sizes, together=1)
    task.row(
        "decode",
        frame=name_nbytes(frame_nbytes),
        frames=len(frames),
        batch=name_nbytes(nbytes),
        density=f"{density:.1%}",
        ratio=round(nbytes / batch.frame_nbytes, 1),
        **timing.cells(nbytes),
    )


def run_kernels(task: Task) -> None:
    """Digest, count, write, gather and store over the same regions, as fractions of a device copy."""
    lab = Lab(task.device)
    sizes = task.sizes
    nbytes, region = sizes.kernel_nbytes, sizes.kernel_region_nbytes
    live_piece = np.random.default_rng(31).integers(0, 256, region, np.uint8)
    live, delta = lab.runtime.empty(nbytes), lab.runtime.empty(nbytes)
    copy_rate = _time_copy(task, lab, live, delta)
    for density in sizes.densities:
        if task.left < 4:
            task.skip(f"kernels at {density:.1%}")
            continue
        delta_piece = make_delta(region, density, 32)
        for memory, piece in ((live, live_piece), (delta, delta_piece)):
            _repeat(lab, memory, piece)
        regions = Regions(lab, live, delta, [region] * (nbytes // region))
        new_digest = xxhash.xxh3_128_intdigest(live_piece ^ delta_piece)
        if _check_kernels(task, regions, live_piece, delta_piece, new_digest, density):
            _time_kernels(task, regions, delta_piece, density, copy_rate)
        del regions
    _time_chain(task, lab, live, delta)


def _time_copy(task: Task, lab: Lab, source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the rate of a copy within the device, read and written bytes counted, in GB/s."""
    lab.stream.fill(source, 1)
    nbytes = 2 * source.numel()
    timing = lab.measure(lambda: lab.stream.copy(target, source), task.sizes)
    cells = timing.cells(nbytes)
    task.row("kernels", step="device copy", density="-", **{"of copy": 1.0}, **cells)
    return timing.rate(nbytes)


def _repeat(lab: Lab, memory: torch.Tensor, piece: Bytes) -> None:
    first = lab.upload(piece)
    for begin in range(0, memory.numel(), piece.size):
        lab.stream.copy(memory[begin : begin + piece.size], first)
    lab.stream.synchronize()


def _check_kernels(
    task: Task, regions: Regions, live: Bytes, delta: Bytes, digest: int, density: float
) -> bool:
    """Run every step once, and compare what it leaves; the live bytes are as before at the end."""
    where = f"at {density:.1%}"
    repeats = regions.nregions
    regions.digest()
    regions.count()
    found = {
        f"digests {where}": regions.digests() == [digest] * repeats,
        f"entries counted {where}": regions.take_list()
        == repeats * int(np.count_nonzero(delta.view(np.uint16))),
    }
    regions.write()
    regions.check_list()
    found[f"the list is what was digested {where}"] = not regions.flagged()
    regions.check_live()
    found[f"live words are what was digested {where}"] = not regions.flagged()
    regions.store()
    stored = regions.lab.upload(live ^ delta)
    found[f"live bytes after the store {where}"] = _all_are(regions, stored)
    regions.check_live()
    found[f"changed live words are noticed {where}"] = regions.flagged()
    regions.store()
    found[f"a second store takes it back {where}"] = _all_are(regions, regions.lab.upload(live))
    for name, ok in found.items():
        task.check(name, ok)
    return all(found.values())


def _all_are(regions: Regions, piece: torch.Tensor) -> bool:
    live = regions.live
    step = piece.numel()
    return all(
        regions.lab.same(live[begin : begin + step], piece)
        for begin in range(0, live.numel(), step)
    )


def _time_kernels(
    task: Task, regions: Regions, delta: Bytes, density: float, copy_rate: float
) -> None:
    lab, sizes, n = regions.lab, task.sizes, regions.nbytes
    touched = delta[: delta.size // _SECTOR * _SECTOR].view(np.uint64).reshape(-1, 4).any(axis=1)
    sectors = regions.nregions * int(touched.sum()) * _SECTOR
    entries = ENTRY_NBYTES * regions.nentries
    steps = {
        "digest sums": (regions.digest_sums, 2 * n + n // 16),
        "count": (regions.count, n + n // 64),
        "write list": (regions.write, n + entries),
        "check list": (regions.check_list, entries),
        "gather check": (regions.check_live, sectors + entries),
        "store": (regions.store, 2 * sectors + entries),
    }
    rates, milliseconds = {}, {}
    for step, (work, nbytes) in steps.items():
        timing = lab.measure(work, sizes)
        rates[step] = timing.rate(nbytes) / copy_rate
        milliseconds[step] = 1e3 * timing.median
        cells = timing.cells(nbytes)
        task.row(
            "kernels",
            step=step,
            density=f"{density:.1%}",
            **{"of copy": round(rates[step], 3)},
            **cells,
        )
    pause = (milliseconds["gather check"] + milliseconds["store"]) / (n / 1e9)
    task.row(
        "pause of the kernels alone", density=f"{density:.1%}", **{"ms per GB": round(pause, 4)}
    )
    if density == 0.01:
        for step in ("digest sums", "count", "write list", "store"):
            task.target(f"{step}, of copy", rates[step], 0.8, at_most=False)
        task.target("gather check + store at 1 %, ms per GB", pause, 0.3, at_most=True)


def _time_chain(task: Task, lab: Lab, live: torch.Tensor, delta: torch.Tensor) -> None:
    """The serial part of XXH3: one region alone, and all of them side by side."""
    sizes = task.sizes
    region = sizes.kernel_region_nbytes
    one = min(GIB, sizes.kernel_nbytes)
    for what, lengths in (
        ("one region", [one]),
        ("regions side by side", [region] * (sizes.kernel_nbytes // region)),
    ):
        if task.left < 2:
            task.skip(f"the chain of {what}")
            continue
        regions = Regions(lab, live, delta, lengths)
        regions.digest_sums()
        timing = lab.measure(regions.digest_chain, sizes, together=1)
        task.row(
            "XXH3 chain",
            case=f"{what} of {name_nbytes(lengths[0])}",
            **{"ms per GiB of one region": round(1e3 * timing.median * GIB / lengths[0], 3)},
            **timing.cells(),
        )
