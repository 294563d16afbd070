"""Streams that run late and out of order never change an update's bytes; without any one wait they do."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gpusync.device.runtime import Wait
from gpusync.device.warmup import warm_up
from gpusync.testing import EmulatedRuntime
from tests import wire
from tests.device import streams
from tests.driver import start_python

pytestmark = pytest.mark.usefixtures("needs_compiler")


@pytest.fixture(scope="module")
def built(
    tmp_path_factory: pytest.TempPathFactory, needs_compiler: None
) -> Iterator[Mapping[str, wire.Stream]]:
    """The streams of all scenarios; no test publishes to them."""
    warm_up(EmulatedRuntime())  # so that the streams of an update are the first ones of its device
    folder: Path = tmp_path_factory.mktemp("waits")
    gc.freeze()
    yield {name: streams.build(folder / name, name) for name in streams.SCENARIOS}
    gc.unfreeze()


@pytest.mark.parametrize("twist", streams.TWISTS)
@pytest.mark.parametrize("scenario", streams.SCENARIOS)
def test_work_that_runs_as_it_is_queued(
    built: Mapping[str, wire.Stream], scenario: str, twist: str
) -> None:
    runtime = EmulatedRuntime()
    assert streams.run(built[scenario], runtime, twist=twist) == ""
    check_that_buffers_were_used_again(runtime)


@pytest.mark.parametrize("order", streams.PERMUTATIONS, ids=str)
def test_every_order_of_the_streams_ends_on_the_same_bytes(
    built: Mapping[str, wire.Stream], order: tuple[int, ...]
) -> None:
    number = streams.PERMUTATIONS.index(order)
    names = list(streams.SCENARIOS)
    second = streams.TWISTS[number % 3] if number % 4 == 0 else "none"
    for name, twist in ((names[number % 3], "none"), (names[(number + 1) % 3], second)):
        runtime = EmulatedRuntime(streams.order_of(order))
        assert streams.run(built[name], runtime, twist=twist) == "", name
        check_that_buffers_were_used_again(runtime)


def check_that_buffers_were_used_again(runtime: EmulatedRuntime) -> None:
    """There are two slots, and eight in the ring."""
    assert runtime.operations["gs_write"] >= 4
    assert runtime.operations["copy"] > 8 + 2 * runtime.operations["gs_count"]


@pytest.fixture(scope="module")
def without(needs_compiler: None) -> Mapping[str, str]:
    """What fails without a wait, or a call that waits."""
    process = start_python("from tests.device.streams import main; main()")
    out, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    found: Mapping[str, str] = json.loads(out)
    return found


def test_nothing_fails_where_no_wait_is_left_out(without: Mapping[str, str]) -> None:
    assert without[streams.NOTHING] == ""


@pytest.mark.parametrize("wait", Wait)
def test_leaving_a_wait_out_is_noticed(without: Mapping[str, str], wait: Wait) -> None:
    assert without[wait.name], f"nothing fails where {wait.value} no more"


@pytest.mark.parametrize("site", streams.sites(), ids=str)
def test_leaving_one_call_that_waits_out_is_noticed(
    without: Mapping[str, str], site: streams.Site
) -> None:
    assert without[str(site)]


def test_every_wait_is_asked_for_somewhere() -> None:
    assert {site.wait for site in streams.sites()} == {None, *(wait.name for wait in Wait)}
