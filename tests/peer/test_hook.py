"""The pre-read hook: called once per host before anything is read, and never able to hurt the host."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpusync.errors import SourceNotReadyError
from tests import wire
from tests.driver import check_at, model_at, open_chain, pull, refused, start_python, update

HOOKS = """
import os, sys, time

def refresh(source_dir, target_version):
    with open(os.environ["HOOK_LOG"], "a") as log:
        log.write(f"{source_dir} {target_version!r}\\n")

def publish(source_dir, target_version):
    hidden = os.path.join(os.path.dirname(source_dir), f"hidden_{target_version}")
    os.rename(hidden, os.path.join(source_dir, f"weight_v{target_version:06d}"))

def fail(source_dir, target_version):
    raise ValueError("the volume is gone: 4711")

def leave(source_dir, target_version):
    sys.exit("leaving with 4712")

def hang(source_dir, target_version):
    time.sleep(1.0)

def narrow(source_dir):
    return None

not_callable = 5
"""


@pytest.fixture
def hooked(stream: wire.Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> wire.Stream:
    """A host at version 1 with version 2 published, and the module ``tiny_hooks`` importable."""
    (tmp_path / "tiny_hooks.py").write_text(HOOKS)
    (tmp_path / "broken_hooks.py").write_text("import no_such_module_4713\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOOK_LOG", str(tmp_path / "log"))
    stream.delta()
    pull(stream, 1)
    stream.delta()
    return stream


def log_of(stream: wire.Stream) -> list[str]:
    path = Path(os.environ["HOOK_LOG"])
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("name", ["tiny_hooks:refresh", "tiny_hooks.refresh"])
def test_the_hook_is_called_once_with_the_source_and_the_target(
    hooked: wire.Stream, name: str
) -> None:
    pull(hooked, 2, pre_read_hook=name)
    check_at(hooked, 2)
    assert log_of(hooked) == [f"{hooked.source} 2"]


def test_open_chain_calls_the_hook_once_too(hooked: wire.Stream) -> None:
    model = model_at(hooked, 1)
    chain = open_chain(hooked, 2, pre_read_hook="tiny_hooks:refresh")
    assert log_of(hooked) == [f"{hooked.source} 2"]
    import gpusync

    gpusync.apply_to_model(model, chain, device="cpu")
    check_at(hooked, 2)
    assert log_of(hooked) == [f"{hooked.source} 2"]


def test_the_hook_runs_before_the_source_is_read(hooked: wire.Stream) -> None:
    hooked.hide(2)
    pull(hooked, 2, pre_read_hook="tiny_hooks:publish")
    check_at(hooked, 2)


def test_a_host_that_is_at_the_target_already_calls_no_hook(hooked: wire.Stream) -> None:
    assert pull(hooked, 1, pre_read_hook="tiny_hooks:refresh").outcome == "unchanged"
    assert log_of(hooked) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tiny_hooks:fail", "ValueError: the volume is gone: 4711"),
        ("tiny_hooks:leave", "4712"),
        ("tiny_hooks:narrow", "narrow.* takes 1 positional argument"),
        ("broken_hooks:refresh", "No module named 'no_such_module_4713'"),
        ("no_such_hooks:refresh", "No module named 'no_such_hooks'"),
        ("tiny_hooks:nothing", "has no attribute 'nothing'"),
        ("tiny_hooks:not_callable", "not callable"),
        ("nodots", "nodots"),
        ("", "hook"),
        (":", "hook"),
    ],
)
def test_a_hook_that_fails_fails_the_pull_with_its_traceback(
    hooked: wire.Stream, name: str, text: str
) -> None:
    with refused(hooked, SourceNotReadyError, text=text):
        pull(hooked, 2, pre_read_hook=name)
    with pytest.raises(SourceNotReadyError, match=text):
        open_chain(hooked, 2, pre_read_hook=name)
    pull(hooked, 2, pre_read_hook="tiny_hooks:refresh")
    check_at(hooked, 2)


def test_the_traceback_names_the_line_of_the_hook(hooked: wire.Stream) -> None:
    with refused(hooked, SourceNotReadyError, text="tiny_hooks.py") as caught:
        pull(hooked, 2, pre_read_hook="tiny_hooks:fail")
    assert "Traceback" in str(caught.value)


def test_a_hook_that_hangs_fails_the_pull_after_its_timeout(
    hooked: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSYNC_HOOK_TIMEOUT_SECONDS", "0.1")
    begun = time.monotonic()
    with refused(hooked, SourceNotReadyError, text=r"0\.1"):
        pull(hooked, 2, pre_read_hook="tiny_hooks:hang")
    assert time.monotonic() - begun < 0.8
    # The lock is kept until the hook returns, so the next pull waits for it.
    pull(hooked, 2, lock_timeout_seconds=20.0)
    assert time.monotonic() - begun >= 0.95
    check_at(hooked, 2)


def test_the_hook_runs_once_per_host_however_many_processes_pull(
    hooked: wire.Stream, tmp_path: Path
) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[5]); import gpusync;"
        "sys.stdin.readline();"
        "gpusync.pull(*sys.argv[1:4], int(sys.argv[4]), 'tiny_hooks:refresh')"
    )
    arguments = (hooked.local, hooked.base, hooked.source, 2, tmp_path)
    processes = [start_python(code, *arguments) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    check_at(hooked, 2)
    assert log_of(hooked) == [f"{hooked.source} 2"]


def test_a_failing_hook_leaves_the_live_module_alone(hooked: wire.Stream) -> None:
    model = model_at(hooked, 1)
    update(hooked, model, 1)
    with refused(hooked, SourceNotReadyError, model=model):
        open_chain(hooked, 2, pre_read_hook="tiny_hooks:fail")
