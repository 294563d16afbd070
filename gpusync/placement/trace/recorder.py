"""Recording what a model's own loader does with checkpoint tensors that have no bytes.

The tensors are meta tensors: PyTorch itself resolves any chain of views of them into storage, offset and strides. Every
operation passes the recorder; those that would write live memory are noted and not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpusync.placement.trace.blame import UntraceableError, blame, reason_of
from gpusync.placement.trace.geometry import Copy, Walk, Write, normal_walk, span_nbytes
from gpusync.placement.trace.operations import (
    COPY,
    FACTORIES,
    MOVES,
    RESHAPES,
    RESIZES,
    Operation,
    on_meta,
    operation_of,
    placed_on_meta,
    plain_walk,
    tensors_in,
)
from gpusync.placement.trace.storages import LiveStorage, StorageRef, storage_key

_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Origin:
    """What a value was made of: checkpoint tensors by name, live storages by key."""

    names: frozenset[str] = _NOTHING
    lives: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.names or self.lives)

    def __or__(self, other: Origin) -> Origin:
        if self is other or other is _NO_ORIGIN:
            return self
        if self is _NO_ORIGIN:
            return other
        return Origin(self.names | other.names, self.lives | other.lives)


_NO_ORIGIN = Origin()


@dataclass(frozen=True, slots=True)
class _Value:
    """A storage that came up in the load. The weak reference keeps its number from being given out again, not its bytes."""

    ref: StorageRef
    origin: Origin


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What one run of a loader did.

    Attributes
    ----------
    copies
        Plain copies by checkpoint tensor, and ``live_keys``, the storages that they go to.
    writes
        Every write to live memory, plain copies included, in order.
    problems
        Checkpoint tensors that were used in a way that no copy describes, with the first reason.
    fills
        Live names, and what else wrote to them.
    leaks
        Keys of live storages whose values went on into other live storages, with the reason.
    current
        The checkpoint tensors that the loader touched last.
    is_streaming
        True until the loader has asked for a tensor after the last.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch's compiler: seconds, and 70 MB

    def __init__(self, live: Mapping[int, LiveStorage]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = live
        self.copies: dict[str, list[Copy]] = {}
        self.live_keys: dict[str, set[int]] = {}
        self.writes: list[Write] = []
        self.problems: dict[str, str] = {}
        self.fills: dict[str, set[str]] = {}
        self.leaks: dict[int, str] = {}
        self.current: frozenset[str] = _NOTHING
        self.is_streaming = True
        self._sources: dict[int, _Value] = {}
        self._derived: dict[int, _Value] = {}
        self._refs: dict[str, StorageRef] = {}
        self._live_origins = {key: Origin(lives=frozenset((key,))) for key in live}

    def add_source(self, name: str, tensor: torch.Tensor) -> None:
        """Follow a checkpoint tensor; nothing here keeps it alive."""
        storage = tensor.untyped_storage()
        names = frozenset((name,))
        self._refs[name] = StorageRef(storage)
        self._sources[storage._cdata] = _Value(self._refs[name], Origin(names))
        self.current = names

    def is_alive(self, name: str) -> bool:
        """Return whether somebody still holds a checkpoint tensor, or a view of it."""
        return not self._refs[name].expired()

    def alive(self) -> Origin:
        """Return what the sources and derived values that somebody still holds were made of."""
        held = [
            value.origin
            for value in (*self._sources.values(), *self._derived.values())
            if not value.ref.expired()
        ]
        return Origin(
            _NOTHING.union(*(origin.names for origin in held)),
            frozenset().union(*(origin.lives for origin in held)),
        )

    def origin_of(self, tensors: Iterable[torch.Tensor]) -> Origin:
        """Return what tensors were made of, themselves included."""
        found = _NO_ORIGIN
        for tensor in tensors:
            key = storage_key(tensor)
            value = self._sources.get(key) or self._derived.get(key)
            if value is not None:
                found |= value.origin
            elif key in self.live:
                found |= self._live_origins[key]
        return found

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Keep the first reason per checkpoint tensor."""
        for name in names:
            self.problems.setdefault(name, reason)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        operation = operation_of(func)
        if operation.is_composite:
            # Inference mode sends these here whole; outside of it they come in parts.
            with self:
                return func.decompose(*args, **kwargs)
        if operation.written:
            return self._run_write(func, operation, types, args, kwargs)
        if operation.is_view:
            return self._run_view(func, args, kwargs)
        return self._run_read(func, operation, args, kwargs)

    def _run_view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception as err:
            origin = self.origin_of(tensors_in((args, kwargs)))
            if func in RESHAPES and origin.names:
                # A copy of a strided view is kept as that view, see _run_read; dense, it would have had this shape.
                dense = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
                return self._mark(func(dense, *args[1:], **kwargs), origin)
            self._failed(origin, err)
            raise

    def _run_read(
        self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        origin = self.origin_of(tensors_in((args, kwargs)))
        if not origin or operation.name in FACTORIES:
            return func(*args, **kwargs)
        if not origin.names:
            return self._mark(func(*args, **kwargs), origin)
        self.current = origin.names
        if func in RESHAPES:
            return self._run_view(func, args, kwargs)
        if (
            func in MOVES
            and kwargs.get("dtype") in (None, args[0].dtype)
            and storage_key(args[0]) in self._sources
        ):
            return args[0].detach()  # the same bytes elsewhere
        try:
            result = func(*on_meta(args), **on_meta(placed_on_meta(kwargs)))
        except Exception as err:
            self._failed(origin, err)
            raise
        return self._mark(result, origin)

    def _failed(self, origin: Origin, err: Exception) -> None:
        """An operation has no answer without bytes. The loader may catch the error: that takes nothing back."""
        self.refuse(origin.names, reason_of(err))
        blame(err, origin.names)

    def _mark(self, result: Any, origin: Origin) -> Any:
        for tensor in tensors_in(result):
            key = storage_key(tensor)
            if not key or key in self._sources or key in self.live:
                continue
            before = self._derived.get(key)
            if before is None:
                self._derived[key] = _Value(StorageRef(tensor.untyped_storage()), origin)
            elif before.origin != origin:
                self._derived[key] = _Value(before.ref, before.origin | origin)
        return result

    def _run_write(
        self,
        func: Any,
        operation: Operation,
        types: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        given = [args[at] if at < len(args) else kwargs.get(name) for at, name in operation.written]
        targets = list(tensors_in(given))
        origin = self.origin_of(tensors_in((args, kwargs)))
        if origin.names:
            self.current = origin.names
        if operation.is_metadata_only:
            if origin and operation.name in RESIZES:
                raise self.untraceable(origin, f"the loader resizes it ({operation.name})")
            return func(*args, **kwargs)
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):
            raise self.untraceable(origin, f"the loader writes to a {types[0].__name__}")
        if any(storage_key(target) in self.live for target in targets):
            self._note_writes(func, operation, args, kwargs, targets)
        elif origin.names:
            self._spoil(targets, origin)
        else:
            result = func(*args, **kwargs)
            if origin.lives:
                self._mark(targets, origin)
            return result
        if not operation.returns_written:
            raise self.untraceable(origin, f"{operation.name} has no answer without bytes")
        if len(func._schema.returns) > 1:
            return tuple(targets)
        return given[0] if func._schema.returns else None

    def untraceable(self, origin: Origin, reason: str) -> UntraceableError:
        """Return the error to raise inside the loader; it carries the names it is about."""
        names = origin.names or self.current
        self.refuse(names, reason)
        err = UntraceableError(reason)
        blame(err, names)
        return err

    def _spoil(self, targets: Iterable[torch.Tensor], origin: Origin) -> None:
        """Memory that is not live takes values that are not there: from now on it is derived, sources too."""
        for target in targets:
            key = storage_key(target)
            source = self._sources.pop(key, None)
            if source is not None:
                self._derived[key] = _Value(source.ref, source.origin | origin)
            else:
                self._mark(target, origin)

    def _note_writes(
        self,
        func: Any,
        operation: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: list[torch.Tensor],
    ) -> None:
        if func is COPY:
            self._note_copy(args[0], args[1])
            return
        written = {id(target) for target in targets}
        inputs = [t for t in tensors_in((args, kwargs)) if id(t) not in written]
        origin = self.origin_of(inputs)
        for target in targets:
            if storage_key(target) in self.live:
                self._note_other(target, origin, f"aten.{operation.name}")
            elif origin.names:
                self._spoil([target], origin)

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        value = self._sources.get(storage_key(source))
        if value is None:
            self._note_other(target, self.origin_of([source]), "a copy")
            return
        (name,) = value.origin.names
        walk = plain_walk(target, source)
        place = self._place_of(target, walk if isinstance(walk, Walk) else None)
        reason = walk if isinstance(walk, str) else place.why_not()
        if isinstance(walk, str) or reason is not None:
            self.refuse([name], f"{place.live_name}: {reason}")
            self.writes.append(place.written_by(None, name))
            return
        self.copies.setdefault(name, []).append(
            Copy(
                source=name,
                live_name=place.live_name,
                itemsize=target.element_size(),
                shape=walk.shape,
                source_offset=int(source.storage_offset()) * source.element_size(),
                source_strides=walk.source_strides,
                live_offset=place.begin,
                live_strides=walk.live_strides,
            )
        )
        self.live_keys.setdefault(name, set()).add(storage_key(target))
        self.writes.append(place.written_by(name, name))

    def _note_other(self, target: torch.Tensor, origin: Origin, what: str) -> None:
        """A write that is no plain copy: a fill, a derived value, a change in place."""
        place = self._place_of(target, None)
        live_name = place.live_name
        self.refuse(origin.names, f"{live_name} takes a value derived from it, by {what}")
        for key in origin.lives:
            source = self.live[key].first_name
            self.leaks.setdefault(key, f"{live_name} takes a value made of {source}, by {what}")
        if not origin:
            self.fills.setdefault(live_name, set()).add(what)
        self.writes.append(place.written_by(None, what))

    def _place_of(self, target: torch.Tensor, walk: Walk | None) -> _Place:
        """Return where a live tensor's bytes are; from the first to the last where they make no plain box."""
        itemsize, strides = target.element_size(), tuple(target.stride())
        box = walk or normal_walk(itemsize, tuple(target.shape), strides, strides)
        if isinstance(box, str):
            box = Walk((itemsize * span_nbytes(target.shape, strides),), (1,), (1,))
        begin = int(target.storage_offset()) * itemsize
        end = begin + span_nbytes(box.shape, box.live_strides)
        storage = self.live[storage_key(target)]
        return _Place(storage, storage.name_at(begin, end), begin, end, box)


@dataclass(frozen=True, slots=True)
class _Place:
    """Bytes of a live storage: a box between ``begin`` and ``end``, which count from the storage's first byte."""

    storage: LiveStorage
    live_name: str
    begin: int
    end: int
    box: Walk

    def why_not(self) -> str | None:
        if self.end > self.storage.nbytes:
            return "its storage was freed or offloaded"
        return self.storage.reason

    def written_by(self, name: str | None, what: str) -> Write:
        address = self.storage.address
        box = self.box
        return Write(
            address + self.begin, address + self.end, box.shape, box.live_strides, name, what
        )
