"""The live side of an update, in parts: the tensors of one device, and what is ready to be stored on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpusync.errors import ModelPoisonedError
from gpusync.folding.plan import TensorPlan
from gpusync.placement.regions import Region
from gpusync.placement.relayout import Relaid, Relayout
from gpusync.placement.slices import Slice
from gpusync.ranks.sharefile import ShareFile, ShareWriter
from gpusync.types import Digest, StageTimes


class LiveChanges(Protocol):
    """One part's change lists, from prepare to release.

    Every method leaves the part's live bytes as they were before the call if it raises, except for
    ModelPoisonedError.
    """

    @property
    def nbytes(self) -> int:
        """Memory that the lists take, in bytes."""

    @property
    def changed_bytes(self) -> int:
        """Live bytes under the lists."""

    def await_engine(self) -> None:
        """Wait for what the engine has queued. A failure leaves the lists as good as they were.

        Raises
        ------
        DeviceError
            A graph is being captured, whose replays would commit again, or the device cannot be waited for now.
        ModelPoisonedError
            The device is lost.
        """

    def check(self) -> None:
        """Hold the live words against those of prepare, as far as that is cheaper than along with the stores.

        Raises
        ------
        PlacementError
            They changed since.
        DeviceError
            The device failed.
        """

    def store(self) -> None:
        """XOR the lists into the live words, and return when that is done.

        Raises
        ------
        PlacementError
            The live words changed since prepare.
        DeviceError
            A store failed and was taken back.
        ModelPoisonedError
            It could not be taken back.
        """

    def take_back(self) -> None:
        """Undo a store that had succeeded.

        Raises
        ------
        ModelPoisonedError
            It cannot be undone.
        """


@dataclass(frozen=True)
class LiveWork:
    """Tensors of one device that may change.

    Parameters
    ----------
    tensors
        Largest first.
    regions, slices
        Where each of them lives: whole, or in parts.
    shares
        Where the shares of those slices go that the ranks prove together; the others are proven by the whole tensor.
    shared
        Address of each storage that several checkpoint tensors share to their names, sorted.
    """

    tensors: tuple[TensorPlan, ...]
    regions: Mapping[str, Region]
    shared: Mapping[int, tuple[str, ...]]
    slices: Mapping[str, tuple[Slice, ...]] = field(default_factory=dict)
    shares: ShareFile | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def share_writers(self, name: str) -> tuple[ShareWriter, ...]:
        """Return what takes the new bytes of a tensor's slices, by number; none where the ranks do not prove it."""
        return self.shares.writers(name) if self.shares is not None else ()

    def names_beside(self, name: str) -> tuple[str, ...]:
        """Return all names of a tensor's storage, sorted: the first one has the change list."""
        region = self.regions.get(name)
        return (name,) if region is None else self.shared.get(region.address, (name,))


@dataclass(frozen=True)
class RelaidWork:
    """Relaid modules that may change.

    Parameters
    ----------
    relaid
        All that are known, as they are now.
    tensors
        Every tensor of each module that may change, by module.
    regions
        The live tensors that hold them, by name.
    relayout
        The engine's.
    changed
        How many of the tensors may change; the others are only made anew, for their module.
    """

    relaid: Relaid
    tensors: Mapping[str, tuple[TensorPlan, ...]]
    regions: Mapping[str, Region]
    relayout: Relayout
    changed: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensors in self.tensors.values() for tensor in tensors)


@dataclass(frozen=True)
class PreparedPart:
    """A part that is verified and ready to be stored.

    Parameters
    ----------
    device
        "cpu", "cuda" or "emulated".
    digests
        xxh3-128 of each tensor's new bytes; of those alone on their storage it may be left out.
    tensors_by_path, reasons
        As in UpdateReport.
    stages
        The part's own, where it has several; they overlap.
    notes
        Whatever took another way than asked, with the reason.
    relaid
        What will be known of relaid modules once the part is stored; None for a part without.
    """

    device: str
    changes: LiveChanges
    digests: Mapping[str, Digest]
    tensors_by_path: Mapping[str, int]
    reasons: Mapping[str, str]
    stages: StageTimes = field(default_factory=StageTimes)
    notes: tuple[str, ...] = ()
    relaid: Relaid | None = None


def commit_parts(parts: Sequence[LiveChanges]) -> None:
    """Store every part, or none.

    Raises
    ------
    PlacementError, DeviceError
        Everything is as it was.
    ModelPoisonedError
        Some parts are stored, and could not be taken back.
    """
    for part in parts:
        part.check()
    for number, part in enumerate(parts):
        try:
            part.store()
        except ModelPoisonedError:
            raise
        except BaseException:
            for stored in parts[:number]:
                stored.take_back()
            raise
