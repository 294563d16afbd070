"""Proving that what an engine does to a module after loading is a pure relayout, and that the model holds its result.

A pure relayout only moves bits, and adds zeros: of zeros it makes zeros, and it commutes with XOR. Random bytes tell it from
whatever scales, rounds or merges. The last proof is by the checkpoint's own bytes: what the engine makes of them must be
what the model holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from gpusync.config import Settings
from gpusync.errors import PlacementError
from gpusync.folder.files import OpenFiles
from gpusync.folder.layout import Layout
from gpusync.folding.fold import Fold
from gpusync.folding.plan import NOTHING_TO_FOLD, plan_tensor
from gpusync.format.digest import digest_of
from gpusync.live.proof import DIFFER, prove
from gpusync.live.relaid import check_scratch, folded, processed
from gpusync.placement.places import Anchor, LoadWeights, Places, trace_places
from gpusync.placement.regions import byte_view, live_tensors, reachable, refused
from gpusync.placement.relayout import (
    Loaded,
    Relaid,
    RelaidModule,
    Relayout,
    flat_bytes,
    name_in,
    reshaped,
    standing_in,
    take_out,
)
from gpusync.types import Digest

_ZEROS, _ONE, _OTHER, _BOTH = (), (1,), (2,), (1, 2)
"""Seeds of the random bytes that a probe is made of, XORed."""


@dataclass(frozen=True)
class Found:
    """The places of a model's tensors, of which some are relaid.

    Parameters
    ----------
    places
        Of all tensors that are placed or relaid, and of ``failed``.
    relaid
        What is known of the relaid modules; None where there are none.
    failed
        Tensors that are not what the checkpoint has, or cannot be relaid, with the reason.
    is_other_checkpoint
        Half of the live tensors, or more, do not hold the checkpoint.
    """

    places: Places
    relaid: Relaid | None
    failed: Mapping[str, str]
    is_other_checkpoint: bool


def find_relaid(
    model: torch.nn.Module,
    layout: Layout,
    files: OpenFiles,
    settings: Settings,
    load_weights: LoadWeights,
    relayout: Relayout,
) -> Found:
    """Find the places of a checkpoint's tensors, and relay the modules of those whose live bytes are not the checkpoint's.

    Raises
    ------
    PlacementError
        No tensor has a place.
    OutOfScratchError
        A module does not fit into scratch memory.
    """
    offered, entries = relayout.modules(), layout.entries()
    other = reshaped(model, offered)
    with standing_in(model, offered, other):
        places = trace_places(model, entries, load_weights)
    places, modules = take_out(places, offered, other, entries)
    places = places.anchored(model, entries)
    differ = prove(places.place(model), layout, files, settings)
    elsewhere = places.live_names(differ)
    touched = [
        name
        for name, loaded in offered.items()
        if name not in other and not elsewhere.isdisjoint(name_in(name, leaf) for leaf in loaded)
    ]
    places, more = take_out(places, offered, touched, entries)
    places = places.anchored(model, entries)
    differ = {name: why for name, why in differ.items() if name in places.copies}
    prover = _Prover(model, relayout, layout, files, settings)
    for module in (*modules, *more):
        prover.take(module)
    failed = {**differ, **prover.failed}
    bad = places.live_names(differ) | prover.differing
    checked = places.live_names(places.copies) | prover.checked
    if not places.copies and not prover.proven:
        raise refused({**places.refused, **failed})
    return Found(
        replace(places, relaid=prover.module_of(), rearranged=prover.anchors),
        prover.relaid(),
        failed,
        bool(bad) and 2 * len(bad) >= len(checked),
    )


class _Prover:
    """Proves modules, one at a time, and notes what came of it.

    Attributes
    ----------
    proven, anchors
        The modules that are relaid, and their live tensors.
    failed
        Tensors of the others, with the reason.
    checked, differing
        Live tensors that were looked at, and those that do not hold the checkpoint.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        relayout: Relayout,
        layout: Layout,
        files: OpenFiles,
        settings: Settings,
    ) -> None:
        self._live = live_tensors(model)
        self._relayout = relayout
        self._layout = layout
        self._files = files
        self._settings = settings
        self._digests: dict[str, Digest] = {}
        self.proven: dict[str, RelaidModule] = {}
        self.anchors: dict[str, Anchor] = {}
        self.failed: dict[str, str] = {}
        self.checked: set[str] = set()
        self.differing: set[str] = set()

    def take(self, module: RelaidModule) -> None:
        """Prove one module, or note why it cannot be relaid."""
        names = {module.name_of(leaf) for leaf in module.loaded}
        self.checked |= names
        try:
            found, digests = self._prove(module)
        except PlacementError as err:
            self.failed |= dict.fromkeys(module.copies, err.message)
            if err.message.startswith(DIFFER):
                self.differing |= names
            return
        self.proven[module.name] = found
        self._digests |= digests
        self.anchors |= {name: Anchor.of(self._live[name]) for name in found.live.values()}

    def module_of(self) -> dict[str, str]:
        """Return the module of each tensor that is relaid."""
        return {name: module.name for module in self.proven.values() for name in module.copies}

    def relaid(self) -> Relaid | None:
        """Return what is known of the proven modules."""
        if not self.proven:
            return None
        live = {name: digest_of("xxh3-128", _array(self._live[name])) for name in self.anchors}
        return Relaid(self.proven, live, self._digests)

    def _prove(self, module: RelaidModule) -> tuple[RelaidModule, dict[str, Digest]]:
        """Return a module with its live tensors, and the digests of its checkpoint tensors."""
        held = {
            leaf: self._live[module.name_of(leaf)]
            for leaf in module.loaded
            if module.name_of(leaf) in self._live
        }
        for leaf, tensor in held.items():
            _check_reachable(module.name_of(leaf), tensor)
        live_nbytes = sum(tensor.nbytes for tensor in held.values())
        check_scratch(module, live_nbytes, self._settings.relayout_bytes)
        plans = [
            plan_tensor(
                name, self._layout, NOTHING_TO_FOLD, self._files, known={}, from_local=False
            )
            for name in module.copies
        ]
        fold = Fold(self._settings.piece_bytes, self._settings.workers)
        scratch, digests = folded(module, plans, fold)
        made = processed(self._relayout, module, scratch)
        for leaf in held.keys() - made.keys():
            raise PlacementError(f"the engine's own processing makes no {module.name_of(leaf)}")
        for leaf, tensor in made.items():
            _check_holds(module, leaf, tensor, self._live.get(module.name_of(leaf)), self._layout)
        live = {leaf: module.name_of(leaf) for leaf in made}
        del scratch, made
        if not any(_moves_bits(self._relayout, module, finite=finite) for finite in (False, True)):
            raise PlacementError(
                f"what the engine makes of {module.name} after loading is no pure relayout: it casts, scales, merges or "
                "rounds; pull, and let the engine reload"
            )
        return replace(module, live=live), digests


def _check_reachable(name: str, tensor: torch.Tensor) -> None:
    reason = reachable(tensor)
    if reason is None and tensor.device.type != "cpu":
        reason = (
            f"on {tensor.device}: relaid tensors are updated in host memory only, in this release"
        )
    if reason is None and not tensor.is_contiguous():
        reason = "not contiguous in memory"
    if reason is not None:
        raise PlacementError(f"{name}, which is rearranged after loading, is {reason}")


def _check_holds(
    module: RelaidModule,
    leaf: str,
    made: torch.Tensor,
    live: torch.Tensor | None,
    layout: Layout,
) -> None:
    """Hold what the engine makes of the checkpoint's bytes against a live tensor."""
    name = module.name_of(leaf)
    if live is None:
        raise PlacementError(f"the engine's own processing makes {name}, which the model has not")
    _check_reachable(name, live)
    loaded = module.loaded.get(leaf)
    if loaded is not None and loaded.dtype != made.dtype and made.dtype.is_floating_point:
        raise PlacementError(f"cast: {name} is loaded as {loaded.dtype}, and {made.dtype} live")
    if (made.dtype, made.shape) != (live.dtype, live.shape):
        raise PlacementError(
            f"the engine's own processing makes {name} {made.dtype} {list(made.shape)}, live it is "
            f"{live.dtype} {list(live.shape)}"
        )
    different = np.not_equal(_array(made), _array(live))
    if different.any():
        raise PlacementError(
            f"{DIFFER} what the engine makes of {layout.folder}, at byte {int(different.argmax())} of {name}"
        )


def _moves_bits(relayout: Relayout, module: RelaidModule, *, finite: bool) -> bool:
    """Return whether processing makes zeros of zeros and commutes with XOR, on random bytes.

    ``finite``: on bytes that are finite floating-point numbers, for kernels that keep no payload of a NaN.
    """
    if any(_array(tensor).any() for tensor in _make(relayout, module, _ZEROS, finite).values()):
        return False
    total = {leaf: _array(t).copy() for leaf, t in _make(relayout, module, _ONE, finite).items()}
    for seeds in (_OTHER, _BOTH):
        for leaf, tensor in _make(relayout, module, seeds, finite).items():
            total[leaf] ^= _array(tensor)
    return not any(array.any() for array in total.values())


def _make(
    relayout: Relayout, module: RelaidModule, seeds: Sequence[int], finite: bool
) -> Mapping[str, torch.Tensor]:
    loaded = module.scratch()
    for seed in seeds:
        _add_random(loaded, seed, finite)
    return processed(relayout, module, loaded)


def _add_random(loaded: Loaded, seed: int, finite: bool) -> None:
    """XOR random bytes into tensors; the same for the same seed."""
    random = np.random.default_rng(seed)
    for leaf in sorted(loaded):
        tensor = loaded[leaf]
        data = flat_bytes(tensor).numpy()
        noise = np.frombuffer(random.bytes(data.size), np.uint8).copy()
        if finite and tensor.is_floating_point():
            # The highest bit of the exponent is the second one of the last byte: without it no number is NaN or infinite.
            noise[tensor.element_size() - 1 :: tensor.element_size()] &= 0xBF
        data ^= noise


def _array(tensor: torch.Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = byte_view(tensor).numpy()
    return array
