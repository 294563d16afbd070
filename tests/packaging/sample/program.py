"""A program as users write it, on an installed gpusync: `test_wheel.py` runs it, and has mypy --strict check it.

Usage: program.py BASE PUBLISHED LOCAL
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

import gpusync


class Engine:
    """What serves: a model whose parameters have the checkpoint's names."""

    def __init__(self, folder: Path) -> None:
        self.model = torch.nn.Module()
        for name, tensor in tensors_of(folder):
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            self.model.register_parameter(name, parameter)

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        yield from load_file(path).items()


def train(publisher: gpusync.Publisher, base: Path, step: int) -> int:
    """Publish one step; the trainer's tensors are the base's, moved."""
    moved = ((name, tensor + step) for name, tensor in tensors_of(base))
    version: int = publisher.publish(moved)
    return version


def update_in_three_steps(engine: Engine, chain: gpusync.Chain) -> gpusync.UpdateReport:
    update: gpusync.Update = gpusync.prepare(engine.model, chain, progress=show)
    engine.pause()
    try:
        update.commit()
    finally:
        engine.resume()
    return update.finish()


def show(progress: gpusync.Progress) -> None:
    done: int = progress.done_bytes
    assert progress.stage and done >= 0


def follow(engine: Engine, source: Path, local: Path, base: Path, version: int) -> str:
    """Bring engine and folder to a version, and say what to do where that fails."""
    try:
        with gpusync.open_chain(source, version, checkpoint=local, base_dir=base) as chain:
            if version % 2:
                report = update_in_three_steps(engine, chain)
            else:
                report = gpusync.apply_to_model(engine.model, chain, write_back="sync")
    except gpusync.ModelPoisonedError:
        return "replace this process"
    except gpusync.SourceNotReadyError as err:
        missing: int | None = err.version
        return f"try again: {missing}"
    except (gpusync.FormatError, gpusync.DigestMismatchError) as err:
        return f"publish again: {err.tensor}"
    except gpusync.ChainError as err:
        return f"reset: {err.expected} {err.got}"
    except (gpusync.PlacementError, gpusync.DeviceError) as err:
        reasons: dict[str, str] = err.reasons if isinstance(err, gpusync.PlacementError) else {}
        pulled: gpusync.PullReport = gpusync.pull(local, base, source, version)
        return f"reload version {pulled.to_version}: {reasons}"
    except gpusync.CheckpointError as err:
        live: int | None = err.live_version
        return f"live {live}, disk {err.disk_version}: the next update catches up"
    pause: float = report.pause_seconds
    stages: dict[str, float] = dict(report.stages.seconds)
    assert pause >= 0 and stages and report.pull is not None
    return f"{report.outcome} {report.from_version} {report.to_version} {report.disk_version}"


def main(base: Path, source: Path, local: Path) -> None:
    first: gpusync.PullReport = gpusync.pull(local, base, source, 0)
    print(first.outcome, first.to_version, first.seed)
    engine = Engine(local)
    attached: gpusync.AttachReport = gpusync.attach(engine.model, local)
    print(len(attached.placed), gpusync.live_version(engine.model))
    publisher = gpusync.Publisher(source, base, encoding="xor")
    for step in (1, 2):
        version = train(publisher, base, step)
        print(follow(engine, source, local, base, version))
    print(follow(engine, source, local, base, 9))
    found: gpusync.VerifyReport = gpusync.verify(local)
    print(found.ok, found.version, [bad.tensor for bad in found.bad])


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
