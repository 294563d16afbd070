"""The ways around a dispatch mode, closed: addresses, arrays and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gpusync.placement.trace.blame import UntraceableError
from gpusync.placement.trace.recorder import Recorder
from gpusync.placement.trace.storages import storage_key

_EXPORTS = {
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
}
"""What makes memory that others can write to."""

_READS = {torch.Tensor.data_ptr, torch.Tensor.tolist}
"""What a meta tensor answers wrongly, or not by an error that names it."""

_WATCHED = _EXPORTS | _READS


class Guard(TorchFunctionMode):
    """Stops the ways out of torch that no dispatch sees: addresses of tensors without bytes, and live memory as an array."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _WATCHED or not self._recorder.is_streaming:
            self._look_at(func, args)
        return func(*args, **(kwargs or {}))

    def _look_at(self, func: Any, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], torch.Tensor):
            return
        recorder = self._recorder
        origin = recorder.origin_of(args[:1])
        if origin.names:
            # A loader that has collected all tensors first is at the one that it looks at.
            recorder.current = origin.names
        if func not in _WATCHED:
            return
        if origin.names:
            raise recorder.untraceable(origin, f"the loader calls {func.__name__}() on it")
        if func in _EXPORTS and storage_key(args[0]) in recorder.live:
            raise recorder.untraceable(
                origin, f"the loader calls {func.__name__}() on a live tensor"
            )


@contextmanager
def threads_inline() -> Iterator[None]:
    """Run the jobs of thread pools at once in the calling thread, and let it start no threads: modes are per thread.

    Other threads of the process are not affected.
    """
    owner = threading.get_ident()
    submit, start = ThreadPoolExecutor.submit, threading.Thread.start

    def submit_inline(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if threading.get_ident() != owner:
            return submit(self, fn, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as err:
            future.set_exception(err)
        return future

    def refuse_start(self: threading.Thread) -> None:
        if threading.get_ident() == owner:
            raise UntraceableError("the loader starts a thread of its own")
        start(self)

    ThreadPoolExecutor.submit = submit_inline  # type: ignore[method-assign, assignment]
    threading.Thread.start = refuse_start  # type: ignore[method-assign]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
        threading.Thread.start = start  # type: ignore[method-assign]
