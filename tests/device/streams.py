"""Updates on an emulated device whose streams run late: what becomes of them, and of those that lack a wait.

Run as a program it leaves out one wait at a time, each in a child process of its own: what is then queued may write
anywhere.
"""

from __future__ import annotations

import ast
import gc
import itertools
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import gpusync
from gpusync.device.chunks import Capacities
from gpusync.device.nvcomp import Nvcomp
from gpusync.device.pipeline import Pipeline
from gpusync.device.runtime import Wait
from gpusync.device.scratch import Scratch
from gpusync.device.segments import ListMemory
from gpusync.device.staging import Feeder, PinnedRing
from gpusync.device.warmup import warm_up
from gpusync.errors import KernelError, PlacementError
from gpusync.folding.fold import Fold
from gpusync.host.changes import ListBudget
from gpusync.live import devices
from gpusync.testing import EmulatedEvent, EmulatedRuntime, EmulatedStream, Order
from tests import live, wire
from tests.unit.strategies import compress, seekable

SCRATCH_NBYTES = 9_250_000
"""Next to the least: batches of 1 MiB of deltas and half as much input."""

LAYOUT = (
    wire.Row(wire.FIRST, "big.weight", "BF16", (1100, 1000), 2_200_000),
    wire.Row(wire.FIRST, "lut", "U8", (1_000_001,), 1_000_001),
    wire.Row(wire.SECOND, "mid.weight", "F16", (300, 411), 246_600),
    wire.Row(wire.SECOND, "small.scale", "F32", (33,), 132),
)
NAMES = tuple(row.name for row in LAYOUT)
CHANGED = "mid.weight"
"""The tensor that the engine writes to between prepare and commit: not the first one of its batch."""

Blob = Callable[[bytes], bytes]


# ---- what is updated ---------------------------------------------------------------------------------


def in_frames(payload: bytes) -> bytes:
    return seekable(payload, 32 << 10)


def side_by_side(payload: bytes) -> bytes:
    """Two frames without a table: the header of the first promises a whole sparse payload."""
    half = len(payload) // 2
    return compress(payload[:half]) + compress(payload[half:])


def _change(stream: wire.Stream) -> wire.State:
    """About three bytes in a hundred, all over every tensor."""
    old = stream.states[stream.last]
    return stream.changed(NAMES, old, 60_000)


def publish_xor(stream: wire.Stream) -> None:
    """Two xor deltas: their frames are decoded in two rounds of each batch."""
    for _ in range(2):
        _delta(stream, "xor", "xxh3-128", dict.fromkeys(NAMES, in_frames))


def publish_full(stream: wire.Stream) -> None:
    """A full version, and overwrites of it: raw bytes through the ring, and live bytes read while decoding."""
    new = _change(stream)
    stream.last += 1
    stream.states[stream.last] = new
    stream.write_checkpoint(stream.folder(stream.last), new)
    _delta(stream, "overwrite", "xxh3-128", dict.fromkeys(NAMES, in_frames))


def publish_sparse(stream: wire.Stream) -> None:
    """A digest that the host proves, and a last tensor that turns out to be one for the host: all is begun again."""
    framings = {**dict.fromkeys(NAMES, in_frames), "small.scale": side_by_side}
    _delta(stream, "xor_sparse", "blake3", framings)


def _delta(stream: wire.Stream, encoding: str, checksum: str, framings: Mapping[str, Blob]) -> None:
    old, new = stream.states[stream.last], _change(stream)
    blobs = {name: framings[name](wire.encode(encoding, old[name], new[name])) for name in NAMES}
    stream.delta(new=new, encoding=encoding, checksum=checksum, bend=wire.Bend(blob=blobs))


SCENARIOS = {"xor": publish_xor, "full": publish_full, "sparse": publish_sparse}


def build(root: Path, scenario: str) -> wire.Stream:
    stream = wire.Stream(root, LAYOUT)
    SCENARIOS[scenario](stream)
    return stream


# ---- one update --------------------------------------------------------------------------------------

PERMUTATIONS = tuple(
    sorted(itertools.permutations(range(4)), key=lambda order: (order[2], order[1]), reverse=True)
)
"""Of the priorities of the engine's stream, and those for copies, decoding and applying; first those in which decoding
has the most to run into."""


def order_of(permutation: tuple[int, ...]) -> Order:
    """Return the order for an update whose pipeline may be begun twice; another stream is commit's."""
    engine, *pipeline = permutation
    return Order((engine, *pipeline, *pipeline, permutation[1]))


TWISTS = ("none", "changed", "failing")
"""What comes between prepare and commit: nothing; the engine writes once more; a call within commit's check fails."""


def run(stream: wire.Stream, runtime: EmulatedRuntime, *, twist: str) -> str:
    """Update a model that the engine has just written, and return what went wrong, if anything."""
    model = live.model_from(stream.base, stream.states[0])
    gpusync.attach(model, stream.base)
    for tensor in (*model.parameters(), *model.buffers()):
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        written = flat.clone()
        flat.fill_(0x55)
        runtime.engine_stream.copy(flat, written)
    small_ring = {"GPUSYNC_RING_BYTES": str(8 << 14), "GPUSYNC_THREADS": "2"}
    with (
        mock.patch.dict(os.environ, small_ring),
        mock.patch.object(devices, "emulated_runtime", lambda: runtime),
    ):
        try:
            wrong = _update(stream, runtime, model, twist)
        except Exception as err:
            wrong = f"{type(err).__name__}: {err}"
    gc.collect()
    runtime.synchronize()
    return wrong or "; ".join(runtime.damage)


def _update(
    stream: wire.Stream, runtime: EmulatedRuntime, model: torch.nn.Module, twist: str
) -> str:
    chain = gpusync.open_chain(stream.source, stream.last, base_dir=stream.base)
    update = gpusync.prepare(model, chain, device="emulated", scratch_bytes=SCRATCH_NBYTES)
    old, new = stream.states[0], stream.states[stream.last]
    if live.bytes_of(model) != old:
        return "prepare returned before what the engine had queued was done"
    if twist == "none":
        update.commit()
        return "" if live.bytes_of(model) == new else "other bytes are live"
    if twist == "failing":
        runtime.fail_at("copy", 1, KernelError("planned"))
        try:
            update.commit()
        except KernelError as err:
            err.__traceback__ = None  # the runtime keeps the error, which would keep the lists
            return "" if live.bytes_of(model) == old else "a failed commit changed live bytes"
        return "a commit that failed went on"
    at = next(at for at in range(99, len(old[CHANGED])) if old[CHANGED][at] != new[CHANGED][at])
    flat = model.get_parameter(CHANGED).detach().reshape(-1).view(torch.uint8)
    runtime.engine_stream.copy(flat[at : at + 1], flat[at : at + 1] ^ 0x10)
    expected = bytearray(old[CHANGED])
    expected[at] ^= 0x10
    try:
        update.commit()
    except PlacementError as err:
        if err.tensor != CHANGED:
            return f"{err.tensor} was said to have changed"
    else:
        return "a model that changed since prepare was committed to"
    right = live.bytes_of(model) == {**old, CHANGED: bytes(expected)}
    return "" if right else "a refused commit changed live bytes"


# ---- updates that lack a wait ------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A call in gpusync/device that has one queue, or the host, wait; ``wait`` is None where it waits for all."""

    module: str
    function: str
    wait: str | None

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.wait or 'synchronize'}"


MODULES = ("applier", "listing", "pipeline", "ring", "segments")
NOTHING = "nothing"
ALARM_SECONDS = 20


@cache
def sites() -> tuple[Site, ...]:
    """Find every wait in the modules of an update."""
    folder = Path(gpusync.__file__).parent / "device"
    found: list[Site] = []
    for path in sorted(folder.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                found += [Site(path.stem, function.name, wait) for wait in _waits_in(function)]
    found = [site for site in found if site.wait or site.module in MODULES]
    assert len(set(found)) == len(found), "two waits of one kind in one function"
    return tuple(found)


def _waits_in(function: ast.FunctionDef) -> Iterator[str | None]:
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "synchronize" and not node.args:
            yield None
        for argument in node.args:
            if isinstance(argument, ast.Attribute) and ast.unparse(argument.value) == "Wait":
                yield argument.attr


def leave_out(site: Site) -> None:
    """Have one call of this process, and no other, not wait."""

    def without(real: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: object, *args: Any) -> Any:
            frame = sys._getframe(1)
            here = Path(frame.f_code.co_filename).stem, frame.f_code.co_name
            wait = next((arg.name for arg in args if isinstance(arg, Wait)), None)
            if (*here, wait) != (site.module, site.function, site.wait):
                return real(self, *args)
            return None

        return method

    for owner, name in (
        (EmulatedStream, "wait"),
        (EmulatedStream, "synchronize"),
        (EmulatedEvent, "synchronize"),
        (EmulatedRuntime, "synchronize"),
    ):
        setattr(owner, name, without(getattr(owner, name)))


def run_nothing(runtime: EmulatedRuntime) -> str:
    """Run a pipeline over no batches, and return what went wrong."""
    nvcomp = Nvcomp(runtime.nvcomp_library())
    scratch = Scratch(runtime, Capacities(1 << 16, 1 << 16, 1 << 16, 1, 1), nvcomp, 1)
    feeder = Feeder(PinnedRing(runtime, 1, 1 << 12), Fold(1 << 12, 1))
    lists = ListMemory(runtime, ListBudget(1 << 12), ListBudget(1 << 12))
    pipeline = Pipeline(runtime, nvcomp, scratch, feeder, lists, lambda nbytes: None)
    verdict, _ = pipeline.run(())
    clean = not (verdict.stopped or verdict.damaged or verdict.unlike or verdict.bad.any())
    return "" if clean else f"without a batch the verdict is {verdict}"


def first_failure(
    streams: Mapping[str, wire.Stream],
    make: Callable[[Order], EmulatedRuntime],
    permutations: Sequence[tuple[int, ...]] = PERMUTATIONS,
) -> str:
    """Return what goes wrong first, over orders and scenarios; nothing if all goes well."""
    orders = [order_of(permutation) for permutation in permutations]
    attempts = [
        partial(run, stream, twist=twist) for stream in streams.values() for twist in TWISTS
    ]
    for order, attempt in (
        *itertools.product(orders[:1], attempts),
        *itertools.product(orders, [run_nothing]),
        *itertools.product(orders[1:], attempts),
    ):
        signal.alarm(ALARM_SECONDS)  # what is no table may keep a kernel busy for ever
        wrong = attempt(runtime=make(order))
        if wrong:
            return f"{order.priorities[:4]}: {wrong}"
    return ""


def in_a_child(work: Callable[[], str]) -> str:
    """Return what ``work`` returns in a child process, or how that dies."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        text = work()
        os.write(writable, text.encode()[:4000])
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return text if code == 0 else f"the process died: {code}"


def main() -> None:
    """Print, as JSON, what fails without each member of Wait, without each call that waits, and without neither."""
    torch.set_num_threads(1)  # a forked process has no other
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warm_up(EmulatedRuntime())
    gc.collect()
    gc.freeze()  # what is there now need not be looked at after every update
    with tempfile.TemporaryDirectory() as folder:
        streams = {name: build(Path(folder) / name, name) for name in SCENARIOS}

        def without_wait(wait: Wait) -> str:
            return first_failure(streams, lambda order: EmulatedRuntime(order, ignored=wait))

        def without_site(site: Site) -> str:
            leave_out(site)
            return first_failure(streams, EmulatedRuntime)

        found = {wait.name: in_a_child(partial(without_wait, wait)) for wait in Wait}
        for site in sites():
            found[str(site)] = in_a_child(partial(without_site, site))
        control = partial(first_failure, streams, EmulatedRuntime, PERMUTATIONS[::12])
        found[NOTHING] = in_a_child(control)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
