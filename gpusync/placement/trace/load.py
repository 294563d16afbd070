"""Running a loader over tensors without bytes, again and again without those that it cannot take, and the verdict."""

from __future__ import annotations

import gc
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from gpusync.placement.regions import live_tensors
from gpusync.placement.tensors import DTYPE_NAMES
from gpusync.placement.trace.blame import blamed, reason_of
from gpusync.placement.trace.geometry import Collision, Copy, find_collisions
from gpusync.placement.trace.guard import Guard, threads_inline
from gpusync.placement.trace.recorder import Origin, Recorder
from gpusync.placement.trace.state import State
from gpusync.placement.trace.storages import LiveStorage, live_storages, storage_key
from gpusync.types import TensorEntry

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_PASSES = 32
_LAG = 3
"""A loader that has asked for this many further tensors and still holds one is keeping it."""

_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Trace:
    """What a loader does with the tensors of a checkpoint. Every tensor is in one of copies, dropped and refused.

    Parameters
    ----------
    copies
        The tensor's copies into live memory, in the order in which they were made. All destinations are disjoint.
    dropped
        Tensors that the loader looks at or skips, and copies nowhere on this rank.
    refused
        Tensors that reach live memory, or may reach it, by something else than plain copies; with the reason.
    fills
        Live name to what else the loader writes there: constants on padding and the like, which no update touches.
    passes
        How often the loader was run: once, and once more after each run that it ended with an error.
    """

    copies: Mapping[str, tuple[Copy, ...]]
    dropped: tuple[str, ...]
    refused: Mapping[str, str]
    fills: Mapping[str, tuple[str, ...]]
    passes: int


def trace_load(
    live: torch.nn.Module | Mapping[str, torch.Tensor],
    entries: Mapping[str, TensorEntry],
    load_weights: LoadWeights,
) -> Trace:
    """Run a loader on tensors without bytes, and return what it would copy where.

    The model is left as it is: no byte of a parameter or buffer is written, and what the loader does to attributes of
    modules and parameters is undone. Jobs of thread pools run in the calling thread meanwhile. No update session may be open,
    and nothing else may use the model. Not seen, and not undone: writes through addresses that the loader took of live
    tensors, and what it does to objects other than modules, their dicts, lists and sets.

    Parameters
    ----------
    live
        The model, or its parameters and buffers by name. Names that share a storage are one destination. With names only,
        attributes are watched where ``load_weights`` is a method of a module.
    entries
        All tensors of the checkpoint, in the order in which the loader shall see them.
    load_weights
        Takes (name, tensor) pairs. Where it raises, the tensor at fault is left out and refused, and the loader starts again.

    Returns
    -------
    Trace
        Pure data; nothing in it refers to the model.
    """
    tensors = live_tensors(live) if isinstance(live, torch.nn.Module) else dict(live)
    for name, tensor in tensors.items():
        if torch.nn.parameter.is_lazy(tensor):
            return _all_refused(entries, f"{name} is not initialized yet", 0)
    owner = live if isinstance(live, torch.nn.Module) else getattr(load_weights, "__self__", None)
    modules = dict(owner.named_modules()) if isinstance(owner, torch.nn.Module) else {}
    storages = live_storages(tensors, _attributes(modules))
    with _one_at_a_time:
        state = State(modules.values(), {name: t for name, t in tensors.items() if storage_key(t)})
        left_out = {
            name: f"dtype {entry.dtype} has no torch equivalent here"
            for name, entry in entries.items()
            if _dtype(entry) is None
        }
        inference = any(tensor.is_inference() for tensor in tensors.values())
        failed = Counter[str]()
        guess = ""
        for number in range(1, _PASSES + 1):
            one = _Pass(storages, entries, left_out)
            if one.run(load_weights, state, inference):
                return one.result(number)
            if not one.at_fault or one.guess == guess != "":
                break
            guess = one.guess
            left_out = _leave_out(entries, left_out, one, failed)
        return _all_refused(entries, f"{one.reason}, in each of {number} passes", number)


def _all_refused(entries: Mapping[str, TensorEntry], reason: str, passes: int) -> Trace:
    return Trace({}, (), dict.fromkeys(entries, reason), {}, passes)


def _attributes(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the tensors that modules hold as plain attributes."""
    return {
        f"{name}.{attribute}".lstrip("."): value
        for name, module in modules.items()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value)
    }


def _leave_out(
    entries: Mapping[str, TensorEntry],
    left_out: Mapping[str, str],
    failed_pass: _Pass,
    failed: Counter[str],
) -> dict[str, str]:
    """Add the tensors at fault; of the second of a kind (equal names but for numbers) all of its kind, to bound the passes."""
    more = dict(left_out)
    for name in failed_pass.at_fault:
        more[name] = failed_pass.reason
        kind = _kind(name)
        failed[kind] += 1
        if failed[kind] == 2:
            like = f"like {name}: {failed_pass.reason}"
            for other in entries:
                if _kind(other) == kind:
                    more.setdefault(other, like)
    return more


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _dtype(entry: TensorEntry) -> torch.dtype | None:
    dtype: torch.dtype | None = getattr(torch, DTYPE_NAMES.get(entry.dtype, ""), None)
    return dtype


class _Pass:
    """One run of the loader over all tensors but those left out.

    Attributes
    ----------
    at_fault, reason
        After an error: the tensors it is about, and what it was.
    guess
        The reason, where which tensors it is about is no more than likely.
    """

    def __init__(
        self,
        storages: Mapping[int, LiveStorage],
        entries: Mapping[str, TensorEntry],
        left_out: Mapping[str, str],
    ) -> None:
        self.at_fault: frozenset[str] = frozenset()
        self.reason = ""
        self.guess = ""
        self._storages = storages
        self._entries = entries
        self._left_out = left_out
        self._recorder = Recorder(storages)
        self._kept = Origin()
        self._rebound: set[int] = set()
        self._handed_out: list[str] = []
        self._held: set[str] = set()

    def run(self, load_weights: LoadWeights, state: State, inference: bool) -> bool:
        """Run the loader and undo what it did to the model. Return False where it raised."""
        grad = torch.inference_mode() if inference else torch.no_grad()
        try:
            with ExitStack() as stack:
                for context in (
                    grad,
                    threads_inline(),
                    self._recorder,
                    Guard(self._recorder),
                ):
                    stack.enter_context(context)
                returned = load_weights(self._weights())
                if isinstance(returned, Iterator):
                    deque(returned, maxlen=0)
                del returned
            self._kept = self._recorder.alive()
            if self._kept:
                gc.collect()  # not what only dead cycles hold
                self._kept = self._recorder.alive()
        except Exception as err:
            self.reason = reason_of(err)
            named = blamed(err)
            self.guess = "" if named or self._recorder.is_streaming else self.reason
            self.at_fault = (named or self._recorder.current) - self._left_out.keys()
            return False
        finally:
            with grad:
                self._rebound = state.undo()
        return True

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, entry in self._entries.items():
            if name in self._left_out:
                continue
            self._handed_out.append(name)
            yield name, self._source(name, entry)
            if len(self._handed_out) > _LAG:
                self._note_held(self._handed_out[-1 - _LAG])
        for name in self._handed_out[-_LAG:]:
            self._note_held(name)
        self._recorder.is_streaming = False

    def _source(self, name: str, entry: TensorEntry) -> torch.Tensor:
        tensor = torch.empty(entry.shape, dtype=_dtype(entry), device="meta")
        self._recorder.add_source(name, tensor)
        return tensor

    def _note_held(self, name: str) -> None:
        if self._recorder.is_alive(name):
            self._held.add(name)

    def result(self, passes: int) -> Trace:
        """Return the verdict on every tensor, after a run without error."""
        recorder = self._recorder
        refused = {**self._left_out, **self._why_refused()}
        copies = {
            name: tuple(recorder.copies[name])
            for name in self._entries
            if name in recorder.copies and name not in refused
        }
        rest = self._entries.keys() - refused.keys() - copies.keys()
        dropped = tuple(name for name in self._entries if name in rest)
        fills = {name: tuple(sorted(what)) for name, what in recorder.fills.items()}
        in_order = {name: refused[name] for name in self._entries if name in refused}
        return Trace(copies, dropped, in_order, fills, passes)

    def _why_refused(self) -> dict[str, str]:
        """Return what the recorder refused, and what only shows after the last tensor."""
        recorder = self._recorder
        for collision in find_collisions(recorder.writes):
            _refuse_collision(recorder, collision)
        recorder.refuse(self._kept.names, "the loader keeps it, or a value made of it")
        for name, keys in recorder.live_keys.items():
            for key in keys:
                reason = self._why_storage_refused(key)
                if reason is not None:
                    recorder.refuse([name], reason)
        handed_out = set(self._handed_out)
        for name in self._entries.keys() - recorder.copies.keys() - self._left_out.keys():
            if name not in handed_out:
                recorder.refuse([name], "the loader stopped before it")
            elif self._left_out and name in self._held:
                left = next(iter(self._left_out))
                recorder.refuse([name], f"held back, and copied nowhere while {left} was left out")
        return recorder.problems

    def _why_storage_refused(self, key: int) -> str | None:
        live_name = self._storages[key].first_name
        if key in self._rebound:
            return f"the loader puts another tensor in the place of {live_name}"
        if key in self._kept.lives:
            return f"the loader keeps a value made of {live_name}, which it is copied to"
        return self._recorder.leaks.get(key)


def _refuse_collision(recorder: Recorder, collision: Collision) -> None:
    earlier, later = collision.earlier, collision.later
    if earlier.name is None:
        return
    if later.name is None:
        recorder.refuse([earlier.name], f"written over afterwards by {later.what}")
    elif later.name == earlier.name:
        recorder.refuse([later.name], "the loader writes it to one place twice")
    else:
        recorder.refuse([earlier.name], f"shares live bytes with {later.name}")
        recorder.refuse([later.name], f"shares live bytes with {earlier.name}")
