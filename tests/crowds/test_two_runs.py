"""Two runs that publish into one folder, and versions published again: told apart, refused, never mixed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import gpusync
from gpusync.errors import ChainError, DigestMismatchError, GpuSyncError, VersionConflictError
from tests import live, wire
from tests.driver import check_at, model_at, open_chain, pull, update

NAMES = ("a.weight", "s.scale", "d.weight", "b.lut", "c.weight", "o.byte")
Publish = Callable[["Runs", int], None]


class Runs:
    """Two runs from one base: the first one's versions stand in the folder, and a host follows them."""

    def __init__(self, root: Path) -> None:
        self.first = wire.Stream(root / "first")
        self.other = wire.Stream(root / "other")
        self.other.states[0] = dict(self.first.states[0])
        shutil.rmtree(self.other.base)
        shutil.copytree(self.first.base, self.other.base)
        self.other.random.bytes(8)  # other changes than the first one's

    def take_over(self, *versions: int) -> None:
        """The other run's versions stand where the first one's were."""
        for version in versions:
            shutil.rmtree(self.first.folder(version), ignore_errors=True)
            shutil.copytree(self.other.folder(version), self.first.folder(version))


@pytest.fixture
def runs(fast_path: Path) -> Runs:
    return Runs(fast_path)


def by_a_plain_writer(stream: wire.Stream, count: int) -> None:
    for _ in range(count):
        stream.delta(NAMES)


def by_a_publisher(stream: wire.Stream, count: int) -> None:
    """With manifests: they name the run, and each version's base."""
    publisher = gpusync.Publisher(stream.source, stream.base)
    for _ in range(count):
        new = stream.changed(NAMES, stream.states[stream.last])
        model = live.model_from(stream.base, new)
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        stream.last = publisher.publish((name, tensor.data) for name, tensor in named.items())
        stream.states[stream.last] = new


WRITERS = (by_a_plain_writer, by_a_publisher)


def check_refused(
    stream: wire.Stream, model: nn.Module | None, at: int, target: int
) -> list[GpuSyncError]:
    """Disk and live refuse a target, and both stay at a version byte for byte."""
    before = wire.snapshot(stream.local)
    attempts: list[Callable[[], Any]] = [lambda: pull(stream, target)]
    if model is not None:
        attempts.append(lambda: update(stream, model, target))
        attempts.append(lambda: update(stream, model, target, write_back="none"))
        attempts.append(
            lambda: gpusync.apply_to_model(
                model, open_chain(stream, target, checkpoint=None), device="cpu"
            )
        )
    errors = []
    for attempt in attempts:
        with pytest.raises((ChainError, DigestMismatchError)) as caught:
            attempt()
        errors.append(caught.value)
        assert wire.snapshot(stream.local) == before
        if model is not None:
            assert live.bytes_of(model) == stream.states[at]
            assert gpusync.live_version(model) == at
    check_at(stream, at)
    return errors


def followed(stream: wire.Stream, version: int) -> nn.Module:
    """Return a live model that followed the stream up to a version, as its folder did."""
    pull(stream, 0)
    model = model_at(stream, 0)
    gpusync.attach(model, stream.local)
    for number in range(1, version + 1):
        update(stream, model, number)
    check_at(stream, version)
    return model


@pytest.mark.parametrize("write", WRITERS)
def test_another_run_of_the_same_numbers_is_refused_on_disk_and_live(
    runs: Runs, write: Callable[[wire.Stream, int], None]
) -> None:
    write(runs.first, 2)
    write(runs.other, 3)
    model = followed(runs.first, 2)
    runs.take_over(1, 2, 3)
    assert all(isinstance(e, VersionConflictError) for e in check_refused(runs.first, model, 2, 2))
    assert all(isinstance(e, VersionConflictError) for e in check_refused(runs.first, model, 2, 3))


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("taken", [(2, 3), (3,), (1, 3)], ids=str)
def test_runs_whose_versions_alternate_are_never_mixed(
    runs: Runs, write: Callable[[wire.Stream, int], None], taken: tuple[int, ...]
) -> None:
    """Two trainers publish into one folder, each the numbers that it finds free."""
    write(runs.first, 3)
    write(runs.other, 3)
    model = followed(runs.first, 1)
    runs.take_over(*taken)
    check_refused(runs.first, model, 1, 3)


def test_indexes_that_are_byte_equal_hide_no_other_run(runs: Runs) -> None:
    """Same tensors, same shards, same file: only headers and blobs tell the runs apart."""
    by_a_plain_writer(runs.first, 2)
    by_a_plain_writer(runs.other, 3)
    model = followed(runs.first, 2)
    indexes = [(run.folder(2) / wire.INDEX).read_bytes() for run in (runs.first, runs.other)]
    assert indexes[0] == indexes[1]
    runs.take_over(2, 3)
    assert all(isinstance(e, VersionConflictError) for e in check_refused(runs.first, model, 2, 2))
    assert all(isinstance(e, VersionConflictError) for e in check_refused(runs.first, model, 2, 3))


@pytest.mark.parametrize("below", [1, 2])
def test_a_version_published_again_below_the_applied_one_is_noticed(runs: Runs, below: int) -> None:
    """Every version after it is the same file: they touch other tensors, and no digest can tell."""
    stream = runs.first
    stream.delta(("a.weight",))
    stream.delta(("b.lut",))
    for _ in range(2):
        stream.delta(("c.weight",))
    model = followed(stream, 3)
    kept = {number: stream.states[number] for number in stream.states}
    stream.republish(below, ("a.weight",) if below == 1 else ("b.lut",))
    stream.states.update(kept)
    for error in check_refused(stream, model, 3, 4):
        assert isinstance(error, VersionConflictError) and error.version == below
    check_refused(stream, model, 3, 3)


def test_a_fresh_host_takes_no_mixture_of_two_runs(runs: Runs) -> None:
    by_a_publisher(runs.first, 2)
    by_a_publisher(runs.other, 2)
    runs.take_over(2)
    with pytest.raises((ChainError, DigestMismatchError)):
        pull(runs.first, 2)
    assert wire.marker_version(runs.first.local) is None
    pull(runs.first, 1)
    check_at(runs.first, 1)


def test_a_reset_leads_from_one_run_to_the_other(runs: Runs) -> None:
    by_a_plain_writer(runs.first, 2)
    by_a_plain_writer(runs.other, 2)
    model = followed(runs.first, 2)
    runs.take_over(1, 2)
    check_refused(runs.first, model, 2, 2)
    update(runs.first, model, 0)
    runs.first.states.update({n: runs.other.states[n] for n in (1, 2)})
    update(runs.first, model, 2)
    assert live.bytes_of(model) == runs.other.states[2]
    check_at(runs.first, 2)


def test_a_publisher_does_not_go_on_where_another_one_published(runs: Runs) -> None:
    stream = runs.first
    one = gpusync.Publisher(stream.source, stream.base, run_id="one")
    two = gpusync.Publisher(
        stream.source, stream.base, run_id="two", state_dir=stream.root / "two.state"
    )
    model = live.model_from(stream.base, stream.changed(NAMES, stream.states[0]))
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert one.publish((name, tensor.data) for name, tensor in named.items()) == 1
    with pytest.raises(VersionConflictError):
        two.publish((name, tensor.data) for name, tensor in named.items())
    assert [path.name for path in sorted(stream.source.glob("weight_v*"))] == ["weight_v000001"]
