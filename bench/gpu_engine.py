"""What an engine does beside an update: capturing CUDA graphs while it is prepared, and replaying them after commit."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import torch
from gpu_lab import Lab, Task
from gpu_model import Parameters, make_step, make_weights, publish

import gpusync
from gpusync.errors import GpuSyncError

_SMALL_NBYTES = 30_000_000
_MOST_CAPTURES = 500


def run_graphs(task: Task) -> None:
    """Graphs and updates at once; nothing of this exists on an emulated device."""
    task.needs_cuda()
    lab = Lab(task.device)
    with tempfile.TemporaryDirectory(prefix="gpusync-bench-") as root:
        check_replay(task, lab, Path(root, "replay"))
        for mode in ("global", "thread_local", "relaxed"):
            check_capture_during_prepare(task, lab, Path(root, mode), mode)
        check_refusals(task, lab, Path(root, "refused"))


class _Scene:
    """A model at version 0, the version that follows, and both as device memory."""

    def __init__(self, lab: Lab, root: Path, model_nbytes: int, copies: int) -> None:
        self.lab = lab
        weights = make_weights(model_nbytes)
        step = make_step(weights, 0.01)
        self.source = publish(root, step, copies)
        self.base, self.new = lab.upload(weights.data), lab.upload(step.new)
        self.parameters = Parameters(weights, copies, lab.runtime.device)
        self.parameters.fill(self.base)
        self.module = self.parameters.module()
        torch.cuda.synchronize()

    def prepare(self) -> gpusync.Update:
        chain = gpusync.open_chain(self.source, 1)
        return gpusync.prepare(self.module, chain, device="cuda", write_back="none")

    def is_new(self) -> bool:
        self.lab.runtime.synchronize()
        return self.parameters.are(self.new)


def check_replay(task: Task, lab: Lab, root: Path) -> None:
    """A graph captured before the update computes with the new weights after it."""
    scene = _Scene(lab, root, _SMALL_NBYTES, 1)
    words = next(iter(scene.module.parameters())).detach()
    side = 1024
    matrix = words[: side * side].view(side, side)
    x = torch.randn(16, side, device=matrix.device).to(torch.bfloat16)
    side_stream = torch.cuda.Stream()
    with torch.cuda.stream(
        side_stream
    ):  # the library of matrix products allocates at its first call
        x @ matrix
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = words.clone()
        product = x @ matrix
    graph.replay()
    torch.cuda.synchronize()
    before = product.clone()
    with scene.prepare() as update:
        update.commit()
        update.finish()
    graph.replay()
    torch.cuda.synchronize()
    expected = scene.new.view(torch.bfloat16)[: words.numel()]
    task.check(
        "a captured graph reads the new weights",
        torch.equal(read.view(torch.int16), expected.view(torch.int16)),
    )
    again = x @ expected[: side * side].view(side, side)
    largest = float((product.float() - again.float()).abs().max())
    task.check(
        "a captured product computes with them",
        torch.equal(product, again) or largest < 1e-2 * float(again.float().abs().max()),
        f"differs from an eager product by at most {largest:.3g}, moved by"
        f" {float((product.float() - before.float()).abs().max()):.3g}",
    )


def check_capture_during_prepare(task: Task, lab: Lab, root: Path, mode: str) -> None:
    """One thread prepares; this one captures graphs all the while. Both must succeed."""
    copies, nbytes = (2, 100_000_000) if task.smoke else (2, 1_000_000_000)
    scene = _Scene(lab, root, nbytes, copies)
    found: list[gpusync.Update | BaseException] = []

    def prepare() -> None:
        try:
            found.append(scene.prepare())
        except BaseException as err:
            found.append(err)

    thread = threading.Thread(target=prepare)
    x = torch.ones(1 << 20, device="cuda")
    failures: list[str] = []
    captures = 0
    thread.start()
    while thread.is_alive() and captures < _MOST_CAPTURES and not failures:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=mode):
                y = x * 2
                for _ in range(20):
                    y = y + x
            graph.replay()
            torch.cuda.synchronize()
            if float(y[0]) != 22.0:
                failures.append("a graph computed something else")
        except RuntimeError as err:
            failures.append(f"{type(err).__name__}: {err}".splitlines()[0])
        captures += 1
    thread.join()
    name = f"capture ({mode}) during prepare"
    task.check(
        f"{name}: every capture",
        not failures and captures > 0,
        "; ".join(failures) or f"{captures} captures",
    )
    (update,) = found
    if isinstance(update, BaseException):
        task.check(f"{name}: the update", False, f"{type(update).__name__}: {update}")
        return
    update.commit()
    update.finish()
    task.check(f"{name}: the update", scene.is_new())


def check_refusals(task: Task, lab: Lab, root: Path) -> None:
    """In a thread that is capturing, prepare and commit refuse, and the capture goes on."""
    scene = _Scene(lab, root, _SMALL_NBYTES, 1)
    x = torch.ones(1024, device="cuda")
    refused = []
    update = scene.prepare()
    other = scene.parameters.module()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        for what, work in (
            (
                "prepare",
                lambda: gpusync.prepare(
                    other, gpusync.open_chain(scene.source, 1), device="cuda", write_back="none"
                ),
            ),
            ("commit", update.commit),
        ):
            try:
                work()
            except GpuSyncError as err:
                refused.append(f"{what}: {type(err).__name__}")
        y = y + 1
    graph.replay()
    torch.cuda.synchronize()
    task.check(
        "prepare and commit refuse during their own thread's capture",
        len(refused) == 2 and float(y[0]) == 3.0 and scene.parameters.are(scene.base),
        ", ".join(refused),
    )
