"""Mutants: what gpusync makes of a bent version or a bent local folder, each drawn from one number.

Run one again, as a failure's last line says::

    python -m tests.fuzz.campaign published --seed 1234 --count 1

A mutant ends in the exact right bytes or in a GpuSyncError with nothing changed: within seconds, in a process whose
memory is capped. Anything else ends the campaign, with the mutant's line.
"""

from __future__ import annotations

import argparse
import collections
import json
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import gpusync
from gpusync.errors import CheckpointError, GpuSyncError
from tests import live, wire
from tests.fuzz import mutations
from tests.fuzz.publication import (
    BENDS,
    Publication,
    bend_file,
    bend_name,
    expected_state,
    redigest,
)
from tests.fuzz.scenes import LOCAL, PUBLISHED, Scene, local_scene, published_scene

SECONDS = 20
MEMORY_BYTES = 1 << 30
_MAX_TEXT = 20_000


class Hang(BaseException):
    """A mutant took too long."""


class Broken(AssertionError):
    """A promise was broken."""


@contextmanager
def bounded() -> Iterator[None]:
    """End the block with `Hang` after some seconds."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"over {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def cap_memory() -> None:
    """Let this process allocate ``MEMORY_BYTES`` more and then fail."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))


def need(fine: bool, message: str) -> None:
    if not fine:
        raise Broken(message)


# ---- bent versions ----------------------------------------------------------------------------------


class PublishedCampaign:
    """Mutants of published versions, pulled or applied to a live model."""

    def __init__(self, root: Path) -> None:
        self._outside = root / "outside"
        self._outside.mkdir()
        self._scenes = [published_scene(name, root) for name in PUBLISHED]
        self._models: dict[str, Any] = {}
        self.note = ""

    def run(self, seed: int) -> str:
        """Run one mutant; return its outcome, "ok" or the error's class."""
        random = Random(seed)
        scene = random.choice(self._scenes)
        is_live = scene.applied is not None and random.random() < 0.4
        self.note = f"{scene.name}, {'live' if is_live else 'pull'}"
        scene.published.restore()
        with bounded():
            self._bend(scene, random)
            return self._apply(scene) if is_live else self._pull(scene)

    def _bend(self, scene: Scene, random: Random) -> None:
        folder = scene.stream.folder(random.choice((scene.target, scene.target, scene.target, 1)))
        if scene.name == "aggregate" and random.random() < 0.7:
            folder = scene.stream.source / "aggregate"
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            if not folder.is_dir():
                return  # an earlier bend took it away
            kind = random.random()
            files = sorted(
                path for path in folder.iterdir() if path.is_file() and not path.is_symlink()
            )
            delta = (
                folder.name == "aggregate" or "full" not in scene.name or folder.name.endswith("1")
            )
            if kind < 0.6 and delta:
                self._bend_structure(folder, scene, random)
            elif kind < 0.85 and files:
                self._say(bend_file(random.choice(files), random, files))
            elif kind < 0.97 and files:
                self._say(bend_name(random.choice(files), random, files, self._outside))
            else:
                self._bend_folder(folder, scene, random)

    def _say(self, text: str) -> None:
        self.note += f"; {text}"

    def _bend_structure(self, folder: Path, scene: Scene, random: Random) -> None:
        try:
            pub = Publication.read(folder)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error):
            return  # an earlier bend left no structure
        bend = random.choice(BENDS)
        try:
            bend(pub, random)
            if random.random() < 0.6:
                base = 0 if folder.name == "aggregate" else int(folder.name[8:]) - 1
                redigest(pub, scene.stream.states[base])
                self._say("digests made to fit")
            pub.write(fit_manifest=random.random() < 0.7)
        except (ValueError, LookupError, TypeError, AttributeError, struct.error):
            return  # two bends that cannot be written down together
        self._say(f"{folder.name}: {bend.__name__}")

    def _bend_folder(self, folder: Path, scene: Scene, random: Random) -> None:
        kind = random.choice(("gone", "renamed", "file", "link out", "link in", "double", "latest"))
        self._say(f"{folder.name}: folder {kind}")
        source = scene.stream.source
        if kind == "latest":
            (source / "latest").unlink(missing_ok=True)
            (source / "latest").symlink_to(
                random.choice(("/etc/passwd", "/dev/zero", "latest", folder))
            )
            return
        if kind == "double":
            (source / "weight_v2").mkdir(exist_ok=True)
            for path in folder.iterdir():
                if path.is_file():
                    shutil.copyfile(path, source / "weight_v2" / path.name)
            return
        if not folder.is_dir() or folder.is_symlink():
            return
        hidden = (self._outside if kind == "link out" else source) / f"moved-{folder.name}"
        if hidden.exists():
            shutil.rmtree(hidden)
        shutil.move(folder, hidden)
        if kind == "renamed":
            hidden.rename(
                source / random.choice(("weight_v3", "weight_v02", "weight_v0000001", "aggregate2"))
            )
        elif kind == "file":
            folder.write_bytes(b"weight")
        elif kind.startswith("link"):
            folder.symlink_to(hidden)

    def _expected(self, scene: Scene) -> wire.State:
        """Return what the bent versions stand for, read on their own."""
        folders: dict[int, Path] = {}
        for path in sorted(scene.stream.source.glob("weight_v*")):
            if path.name[8:].isdecimal():
                folders.setdefault(int(path.name[8:]), path)
        state = scene.old
        for version in range((scene.applied or 0) + 1, scene.target + 1):
            plain = scene.stream.folder(version)
            state = expected_state(plain if plain.exists() else folders[version], state)
        return state

    def _check_right(self, scene: Scene, got: wire.State) -> None:
        if (
            got == scene.new
        ):  # an aggregate stood in for the bent versions, or the bend changed nothing
            return
        aggregate = scene.stream.source / "aggregate"
        try:
            stands_in = scene.applied is None and aggregate.is_dir()
            if stands_in and expected_state(aggregate, scene.stream.states[0]) == got:
                return
        except Exception:  # the aggregate is torn, and then it must not have been used
            pass
        try:
            expected = self._expected(scene)
        except Exception as err:
            raise Broken(f"taken, and by its plain reading it stands for nothing: {err!r}") from err
        wrong = sorted(name for name in {*got, *expected} if got.get(name) != expected.get(name))
        need(not wrong, f"taken, with wrong bytes in {wrong}")

    def _pull(self, scene: Scene) -> str:
        stream = scene.stream
        before = wire.snapshot(stream.local) if stream.local.exists() else None
        try:
            gpusync.pull(stream.local, stream.base, stream.source, scene.target, durable=False)
        except GpuSyncError as err:
            _check_text(err)
            if before is not None:
                need(wire.snapshot(stream.local) == before, "refused, and the folder changed")
            elif stream.local.exists():
                left = {path.name for path in stream.local.iterdir()}
                need(left <= {".weight_sync"}, f"refused, and a fresh folder holds {left}")
            return type(err).__name__
        try:
            self._check_right(scene, wire.read_tensors(stream.local))
            need(
                wire.marker_version(stream.local) == scene.target, "the marker is not at the target"
            )
        finally:
            scene.restore_local()
        return "ok"

    def _apply(self, scene: Scene) -> str:
        stream = scene.stream
        model = self._models.get(scene.name)
        if model is None:
            model = self._models[scene.name] = live.model_from(stream.base, scene.old)
            gpusync.attach(model, stream.local)
        before, pointers = wire.snapshot(stream.local), live.pointers_of(model)
        try:
            with gpusync.open_chain(
                stream.source, scene.target, checkpoint=stream.local, base_dir=stream.base
            ) as chain:
                gpusync.apply_to_model(model, chain, device="cpu", durable=False)
        except GpuSyncError as err:
            _check_text(err)
            need(live.bytes_of(model) == scene.old, "refused, and the live model changed")
            need(live.pointers_of(model) == pointers, "refused, and parameters moved")
            need(wire.snapshot(stream.local) == before, "refused, and the folder changed")
            return type(err).__name__
        del self._models[scene.name]
        try:
            self._check_right(scene, live.bytes_of(model))
            need(wire.read_tensors(stream.local) == live.bytes_of(model), "live and disk differ")
        finally:
            scene.restore_local()
        return "ok"


# ---- bent local folders -----------------------------------------------------------------------------


class LocalCampaign:
    """Mutants of ``.weight_sync``; what is published is good, and so are the weights."""

    def __init__(self, root: Path) -> None:
        self._outside = root / "outside"
        (self._outside / "taken").mkdir(parents=True)
        self._scenes = [local_scene(name, root) for name in LOCAL]
        self.note = ""

    def run(self, seed: int) -> str:
        """Run one mutant; return its outcome, "ok" or the error's class."""
        random = Random(seed)
        scene = random.choice(self._scenes)
        self.note = scene.name
        scene.restore_local()
        keep = self._outside / "keep.safetensors"
        keep.write_bytes(b"not ours to remove")
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            self._bend(scene.stream.local, random)
        with bounded():
            outcome = self._pull(scene)
        need(keep.read_bytes() == b"not ours to remove", "a file outside of the folder was changed")
        return outcome

    def _bend(self, local: Path, random: Random) -> None:
        state = local / ".weight_sync"
        files = sorted(
            path for path in state.rglob("*") if path.is_file() and not path.is_symlink()
        )
        # Staged weights and the config.json held aside are the checkpoint's own: a flipped bit there is bit rot, which is
        # a scrub's to find, and nobody can make a lost config.json again.
        text = [
            path
            for path in files
            if "staging/files" not in str(path) and path.name != "config.json"
        ]
        kind = random.random()
        if kind < 0.6 and text:
            self.note += f"; {bend_file(random.choice(text), random, text)}"
        elif kind < 0.75 and text:
            self.note += (
                f"; {bend_name(random.choice(text), random, text, self._outside / 'taken')}"
            )
        elif kind < 0.85 and len(files) > 1:
            path = random.choice([path for path in files if path.name != "config.json"])
            path.unlink()
            self.note += f"; {path.name}: gone"
        else:
            self._add(state, random)

    def _add(self, state: Path, random: Random) -> None:
        """Put something in ``.weight_sync`` that a pull does not expect under its name."""
        name = random.choice(
            (
                "staging",
                "spool",
                "journal.json",
                "rolled.jsonl",
                "reserve",
                "lock",
                "digests.json",
                "x.tmp",
                "state.json.tmp",
            )
        )
        path = state / name
        kind = random.choice(("file", "folder", "link out", "text"))
        self.note += f"; {name}: {kind} put there"
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if kind == "folder":
            (path / "deeper").mkdir(parents=True)
        elif kind == "link out":
            path.symlink_to(self._outside)
        elif kind == "text":
            path.write_bytes(
                random.choice(
                    (b'[["a"], 1]', b"[[], []]", b"[" * 9999, b"{}", b"null", b"\0" * 99, b"\xff")
                )
            )
        else:
            path.write_bytes(mutations.mutate_bytes(b'{"id": "x", "tensors": {}}', random))

    def _pull(self, scene: Scene) -> str:
        stream = scene.stream
        before = _weights(stream.local)
        try:
            gpusync.pull(
                stream.local,
                stream.base,
                stream.source,
                scene.target,
                durable=False,
                lock_timeout_seconds=0,
            )
        except GpuSyncError as err:
            _check_text(err)
            now = _weights(stream.local)
            if isinstance(
                err, CheckpointError
            ):  # in the middle of a swap: each file is whole, old or new
                whole = self._whole(scene)
                need(
                    all(data in whole.get(name, ()) for name, data in now.items()), "a file is torn"
                )
            else:
                need(now == before, "refused, and weight files changed")
            return type(err).__name__
        need(wire.read_tensors(stream.local) == scene.new, "done, with wrong bytes")
        need(wire.marker_version(stream.local) == scene.target, "the marker is not at the target")
        need((stream.local / "config.json").exists(), "config.json is lost")
        return "ok"

    def _whole(self, scene: Scene) -> dict[str, set[bytes]]:
        whole: dict[str, set[bytes]] = {}
        for version in (0, 1, 2):
            folder = self._outside / scene.name / str(version)
            if not folder.exists():
                gpusync.pull(folder, scene.stream.base, scene.stream.source, version, durable=False)
            for name, data in _weights(folder).items():
                whole.setdefault(name, set()).add(data)
        return whole


def _weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors") if path.is_file()}


def _check_text(err: GpuSyncError) -> None:
    text = str(err)
    need(len(text) < _MAX_TEXT, "the error's text is long")
    json.dumps(err.to_dict(), default=str).encode()


# ---- running ----------------------------------------------------------------------------------------

KINDS = {"published": PublishedCampaign, "local": LocalCampaign}


def run(kind: str, seed: int, count: int, folder: Path, *, tell: bool = False) -> dict[str, Any]:
    """Run ``count`` mutants from ``seed`` on; return how many ended how, and mutants per second.

    Raises
    ------
    Broken
        With the mutant's line; its cause is what went wrong.
    """
    campaign = KINDS[kind](folder)
    cap_memory()
    outcomes: collections.Counter[str] = collections.Counter()
    begun = time.monotonic()
    for number in range(seed, seed + count):
        try:
            outcome = campaign.run(number)
        except BaseException as err:  # an interrupt says which mutant it came in, too
            line = f"python -m tests.fuzz.campaign {kind} --seed {number} --count 1   # {campaign.note}"
            raise Broken(f"{type(err).__name__}: {err}\n{line}") from err
        if tell:
            print(f"{number} {outcome}: {campaign.note}", file=sys.stderr)
        outcomes[outcome] += 1
    seconds = time.monotonic() - begun
    return {
        "mutants": count,
        "per_second": round(count / seconds, 1),
        "outcomes": dict(outcomes.most_common()),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--tell", action="store_true", help="print each mutant and its outcome")
    options = parser.parse_args()
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        try:
            print(
                json.dumps(
                    run(options.kind, options.seed, options.count, Path(folder), tell=options.tell)
                )
            )
        except Broken as err:
            traceback.print_exception(err.__cause__)
            print(err, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
