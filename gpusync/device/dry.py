"""Host dry passes: what the device cannot settle is folded on the host over the live bytes, and written nowhere.

Three uses. Digests that no kernel takes (blake3, adler32) are held against the publisher's here, and the xxh3-128 of the
same bytes is what the device's own digest is then held against. Where the model holds slices of a tensor, the whole is
folded over a checkpoint's bytes and held against the publisher's digest, and the device's digest of each slice against
that of the same bytes here. And a tensor that the device found bad is folded again,
so that the error is the one that the CPU path raises for those bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpusync.device.runtime import Runtime
from gpusync.errors import DecodeError
from gpusync.folding.fold import Bytes, Fold
from gpusync.folding.parallel import run_parallel
from gpusync.folding.plan import TensorPlan, mismatch
from gpusync.format.digest import Hasher, new_hasher
from gpusync.host.parts import LiveWork
from gpusync.placement.slices import Slice, any_within
from gpusync.ranks.sharefile import ShareWriter
from gpusync.types import Algorithm, Digest

DEVICE_ALGORITHM: Algorithm = "xxh3-128"


def needs_dry_pass(tensor: TensorPlan) -> bool:
    """Return whether a tensor's published digest is of an algorithm that no kernel takes."""
    return tensor.expected is not None and tensor.expected.algorithm != DEVICE_ALGORITHM


@dataclass(frozen=True)
class Proof:
    """xxh3-128 of a tensor's new bytes, which are the published ones, and of each slice of it that the model holds.

    ``whole`` is None where only slices were folded, which the ranks prove together.
    """

    whole: Digest | None
    slices: tuple[Digest, ...] = ()


def prove_on_host(
    tensors: Sequence[TensorPlan], runtime: Runtime, fold: Fold, work: LiveWork
) -> dict[str, Proof]:
    """Fold tensors on the host and return their proofs; shares are written where the ranks prove slices together.

    The engine's queued writes to the live bytes must be done.

    Raises
    ------
    DigestMismatchError, FrameFormatError, SourceNotReadyError, VersionConflictError
        As the CPU path raises them.
    """

    def one(tensor: TensorPlan) -> tuple[str, Proof]:
        runtime.enter_thread()
        sink = _SliceDigests(work.slices.get(tensor.name, ()), work.share_writers(tensor.name))
        if sink.shares:
            fold.run(tensor.nbytes, tensor.origin, tensor.blobs, sink, (), wanted=sink.wants)
            return tensor.name, Proof(None, sink.digests())
        algorithms = {DEVICE_ALGORITHM}
        if tensor.expected is not None:
            algorithms.add(tensor.expected.algorithm)
        digests = fold.run(tensor.nbytes, tensor.origin, tensor.blobs, sink, algorithms)
        if tensor.expected is not None and digests[tensor.expected.algorithm] != tensor.expected:
            raise mismatch(tensor, digests[tensor.expected.algorithm])
        return tensor.name, Proof(digests[DEVICE_ALGORITHM], sink.digests())

    return dict(run_parallel(one, tensors, fold.workers, lambda tensor: tensor.nbytes))


class _SliceDigests:
    """Digests slices of a tensor while its bytes are folded."""

    def __init__(self, slices: Sequence[Slice], shares: Sequence[ShareWriter]) -> None:
        self._slices = slices
        self._hashers: list[Hasher] = []
        self.shares = shares

    def write(self, piece: Bytes, offset: int) -> None:
        if offset == 0:
            self._hashers = [new_hasher(DEVICE_ALGORITHM) for _ in self._slices]
            for share in self.shares:
                share.restart()
        for number, part in enumerate(self._slices):
            range_ = part.part_of(offset, piece.size)
            if range_[0] < range_[1]:
                new = part.from_tensor(piece, offset, range_)
                self._hashers[number].update(new.data)
                if self.shares:
                    self.shares[number].write(range_[0], new)

    def wants(self, offset: int, nbytes: int) -> bool:
        return any_within(self._slices, offset, nbytes)

    def digests(self) -> tuple[Digest, ...]:
        """Return the slices' digests; the shares are complete."""
        for share in self.shares:
            share.finish()
        return tuple(hasher.digest() for hasher in self._hashers)


def explain(
    tensor: TensorPlan, runtime: Runtime, fold: Fold, work: LiveWork, what: str
) -> DecodeError:
    """Raise what the CPU path raises for a tensor that the device found bad; where it finds nothing, return our error.

    Parameters
    ----------
    what
        What the device saw.
    """
    prove_on_host([tensor], runtime, fold, work)
    return DecodeError(
        f"the device {what}, and the host finds nothing wrong with the same blob; use device='cpu' or the disk path",
        tensor=tensor.name,
        version=tensor.blobs[-1].delta.version if tensor.blobs else None,
    )
