"""Whether nvCOMP decodes correctly on this device: decided by decoding a corpus of valid frames, once per process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpusync.device.corpus import Sample, make_corpus
from gpusync.device.nvcomp import DecodeArrays, Nvcomp, describe_status
from gpusync.device.runtime import Runtime
from gpusync.errors import DecodeError

_GUARD_NBYTES = 256  # before and after each output, and the scratch, which must stay as they were
_GUARD = 0xC7
_Bytes = npt.NDArray[np.uint8]
_Sizes = npt.NDArray[np.uint64]
_VERDICTS: dict[tuple[str, str, str], str | None] = {}
_LOCK = threading.Lock()


def nvcomp_is_trusted(runtime: Runtime, nvcomp: Nvcomp) -> str | None:
    """Return None where nvCOMP passes :func:`check_nvcomp` on this device, else why not.

    Checked at the first call for a device and library, remembered for the life of the process; calls from several
    threads wait for the one that checks. What is raised is not remembered.

    Raises
    ------
    OutOfScratchError
        The device has no memory left for the check.
    ModelPoisonedError
        The device is lost.
    """
    key = (runtime.name, str(runtime.device), nvcomp.path)
    with _LOCK:
        if key not in _VERDICTS:
            _VERDICTS[key] = check_nvcomp(runtime, nvcomp)
        return _VERDICTS[key]


def check_nvcomp(runtime: Runtime, nvcomp: Nvcomp) -> str | None:
    """Decode the corpus in one batch on a stream of its own, wait for it, and compare every byte.

    The frames lie and are decoded at addresses of any alignment. It takes about 26 MiB of device memory, four times
    what the frames decode to, until it returns, and no page-locked memory.

    Parameters
    ----------
    runtime, nvcomp
        The device, entered by this thread, and the library.

    Returns
    -------
    str or None
        What went wrong first: a refused batch, a status, a size, a byte of an output, or a byte in the guards around
        outputs and scratch. These guards are the check's own memory: damage there is no damage to the model.

    Raises
    ------
    OutOfScratchError, ModelPoisonedError
        As :func:`nvcomp_is_trusted`.
    """
    batch = _lay_out(make_corpus())
    try:
        found = _decode(runtime, nvcomp, batch)
    except DecodeError as err:
        reason: str | None = str(err)
    else:
        reason = _first_difference(batch, found)
    if reason is None:
        return None
    return f"nvCOMP {nvcomp.version} fails its self-test on {runtime.describe()}: {reason}"


@dataclass(frozen=True)
class _Batch:
    """A corpus laid out: frames one behind the other, outputs with guards between."""

    samples: Sequence[Sample]
    frames: _Bytes
    frame_nbytes: _Sizes
    outputs: _Bytes  # as they should be, guards included
    output_offsets: _Sizes
    content_nbytes: _Sizes


@dataclass(frozen=True)
class _Found:
    """What the decode has left."""

    outputs: _Bytes
    sizes: _Sizes
    statuses: npt.NDArray[np.int32]
    temp_guards: _Bytes


def _lay_out(samples: Sequence[Sample]) -> _Batch:
    frame_nbytes = np.array([len(sample.frame) for sample in samples], np.uint64)
    content_nbytes = np.array([len(sample.content) for sample in samples], np.uint64)
    output_offsets = np.cumsum(content_nbytes + np.uint64(_GUARD_NBYTES)) - content_nbytes
    outputs = np.full(
        int(output_offsets[-1] + content_nbytes[-1]) + _GUARD_NBYTES, _GUARD, np.uint8
    )
    for sample, offset in zip(samples, output_offsets.tolist(), strict=True):
        outputs[offset : offset + len(sample.content)] = np.frombuffer(sample.content, np.uint8)
    # Writable, as torch wants it; zeros behind, should the decoder read ahead.
    frames = np.frombuffer(
        bytearray(b"".join(sample.frame for sample in samples) + bytes(_GUARD_NBYTES)), np.uint8
    )
    return _Batch(samples, frames, frame_nbytes, outputs, output_offsets, content_nbytes)


def _decode(runtime: Runtime, nvcomp: Nvcomp, batch: _Batch) -> _Found:
    count = len(batch.samples)
    temp_nbytes = nvcomp.decode_temp_nbytes(
        count, int(batch.content_nbytes.max()), int(batch.content_nbytes.sum())
    )
    frames = runtime.empty(batch.frames.size)
    outputs = runtime.empty(batch.outputs.size)
    table = runtime.empty(DecodeArrays.NBYTES_PER_FRAME * count)
    temp = runtime.empty(_GUARD_NBYTES + temp_nbytes + _GUARD_NBYTES)
    inputs = _inputs(batch, frames.data_ptr(), outputs.data_ptr())
    written = table[inputs.size :]
    results = (outputs, written, temp[:_GUARD_NBYTES], temp[-_GUARD_NBYTES:])
    copies = [torch.empty(part.numel(), dtype=torch.uint8) for part in results]
    stream = runtime.stream()
    try:
        stream.copy(frames, torch.from_numpy(batch.frames))
        stream.copy(table[: inputs.size], torch.from_numpy(inputs))
        for part in (outputs, written, temp):
            stream.fill(part, _GUARD)
        nvcomp.decode(
            stream,
            DecodeArrays.within(table.data_ptr(), count),
            temp[_GUARD_NBYTES:-_GUARD_NBYTES],
        )
        for copy, part in zip(copies, results, strict=True):
            stream.copy(copy, part)
    finally:
        # Memory is given back on return: not while the queue uses it.
        stream.synchronize()
    found, sizes_and_statuses, before, after = (copy.numpy() for copy in copies)
    return _Found(
        outputs=found,
        sizes=sizes_and_statuses[: 8 * count].view(np.uint64),
        statuses=sizes_and_statuses[8 * count :].view(np.int32),
        temp_guards=np.concatenate([before, after]),
    )


def _inputs(batch: _Batch, frames: int, outputs: int) -> _Bytes:
    """Return the arrays that a decode reads, as ``DecodeArrays.within`` lays them out."""
    frame_offsets = np.cumsum(batch.frame_nbytes) - batch.frame_nbytes
    return np.concatenate(
        [
            np.uint64(frames) + frame_offsets,
            batch.frame_nbytes,
            batch.content_nbytes,
            np.uint64(outputs) + batch.output_offsets,
        ]
    ).view(np.uint8)


def _first_difference(batch: _Batch, found: _Found) -> str | None:
    """Return what differs first: of each sample its status, size and bytes, then the guards."""
    differs = np.flatnonzero(batch.outputs != found.outputs)
    for number, sample in enumerate(batch.samples):
        nbytes, offset = len(sample.content), int(batch.output_offsets[number])
        if found.statuses[number]:
            return f"sample {sample.name!r}: {describe_status(int(found.statuses[number]))}"
        if found.sizes[number] != nbytes:
            return f"sample {sample.name!r}: {found.sizes[number]} bytes, not {nbytes}"
        at = np.searchsorted(differs, offset)
        if at < differs.size and differs[at] < offset + nbytes:
            return f"sample {sample.name!r}: the byte at {differs[at] - offset} is wrong"
    if differs.size:
        return f"bytes outside the outputs were written: {differs.size}"
    if (found.temp_guards != _GUARD).any():
        return "bytes outside the scratch were written"
    return None
