"""Host dry passes: what the device cannot settle is folded on the host over the live bytes, and written nowhere.

Two uses. Digests that no kernel takes (blake3, adler32) are held against the publisher's here, and the xxh3-128 of the
same bytes is what the device's own digest is then held against. And a tensor that the device found bad is folded again,
so that the error is the one that the CPU path raises for those bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpusync.device.runtime import Runtime
from gpusync.errors import DecodeError
from gpusync.fold import Fold, NullSink, run_parallel
from gpusync.materialize import TensorPlan, mismatch
from gpusync.types import Algorithm, Digest

DEVICE_ALGORITHM: Algorithm = "xxh3-128"


def needs_dry_pass(tensor: TensorPlan) -> bool:
    """Return whether a tensor's published digest is of an algorithm that no kernel takes."""
    return tensor.expected is not None and tensor.expected.algorithm != DEVICE_ALGORITHM


def prove_on_host(tensors: Sequence[TensorPlan], runtime: Runtime, fold: Fold) -> dict[str, Digest]:
    """Fold tensors on the host and return xxh3-128 of their new bytes, once those were shown to be the published ones.

    The engine's queued writes to the live bytes must be done.

    Raises
    ------
    DigestMismatchError, FrameFormatError, SourceNotReadyError, VersionConflictError
        As the CPU path raises them.
    """

    def one(tensor: TensorPlan) -> tuple[str, Digest]:
        runtime.enter_thread()
        algorithms = {DEVICE_ALGORITHM}
        if tensor.expected is not None:
            algorithms.add(tensor.expected.algorithm)
        digests = fold.run(tensor.nbytes, tensor.origin, tensor.blobs, NullSink(), algorithms)
        if tensor.expected is not None and digests[tensor.expected.algorithm] != tensor.expected:
            raise mismatch(tensor, digests[tensor.expected.algorithm])
        return tensor.name, digests[DEVICE_ALGORITHM]

    return dict(run_parallel(one, tensors, fold.workers))


def explain(tensor: TensorPlan, runtime: Runtime, fold: Fold, what: str) -> DecodeError:
    """Raise what the CPU path raises for a tensor that the device found bad; where it finds nothing, return our error.

    Parameters
    ----------
    what
        What the device saw.
    """
    prove_on_host([tensor], runtime, fold)
    return DecodeError(
        f"the device {what}, and the host finds nothing wrong with the same blob; use device='cpu' or the disk path",
        tensor=tensor.name,
        version=tensor.blobs[-1].delta.version if tensor.blobs else None,
    )
