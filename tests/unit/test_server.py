"""The HTTP server: a real uvicorn on 127.0.0.1, real pulls, httpx as the trainer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="httpx is not installed (extra dev)")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra server)")

from gpusync.outcome import StopFlag  # noqa: E402
from gpusync.server import app as server  # noqa: E402
from tests import driver, wire  # noqa: E402

TOKEN = "a secret, with ü in it"


@pytest.fixture
def stream(tmp_path: Path) -> wire.Stream:
    """A tiny base checkpoint with two published versions, and no local folder."""
    made = wire.Stream(tmp_path / "stream")
    made.delta()
    made.delta()
    return made


@contextmanager
def serving(config: server.ServerConfig) -> Iterator[Any]:
    """Run the application in a thread on a free port; yield a client."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    app = server.create_app(config, StopFlag())
    running = uvicorn.Server(uvicorn.Config(app, http="h11", ws="none", log_config=None))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False
        ) as client:
            yield client
    finally:
        running.should_exit = True
        thread.join(60)
        listener.close()


def body(stream: wire.Stream, target: int) -> dict[str, Any]:
    return {
        "local_checkpoint_dir": str(stream.local),
        "source_dir": str(stream.source),
        "target_version": target,
    }


def metric(client: Any, line: str) -> float:
    """Return the value of one sample of /metrics; 0 where it is not there."""
    for text in client.get("/metrics").text.splitlines():
        name, _, value = text.rpartition(" ")
        if name == line:
            return float(value)
    return 0.0


class Gate:
    """A pre-read hook that holds every pull until it is opened, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, source_dir: str, target_version: int) -> None:
        self.calls += 1
        self.entered.set()
        assert self.opened.wait(60)


# ---- a pull -----------------------------------------------------------------------------------------------


def test_a_pull_replies_with_its_report_and_counts(stream: wire.Stream) -> None:
    with serving(server.ServerConfig(stream.base)) as client:
        reply = client.post("/pull_weights", json=body(stream, 2))
        assert reply.status_code == 200
        report = reply.json()
        assert report["success"] is True
        assert isinstance(report["message"], str)
        assert (report["outcome"], report["to_version"], report["versions"]) == (
            "applied",
            2,
            [1, 2],
        )
        driver.check_at(stream, 2)
        again = client.post("/pull_weights", json=body(stream, 2)).json()
        assert (again["success"], again["outcome"]) == (True, "unchanged")
        assert metric(client, "gpusync_applied_version") == 2
        assert metric(client, 'gpusync_pull_seconds_count{stage="total"}') == 2
        assert metric(client, 'gpusync_pull_seconds_count{stage="materialize"}') >= 1
        assert metric(client, "gpusync_read_bytes_total") == report["wire_bytes"] > 0
        assert metric(client, "gpusync_written_bytes_total") == report["written_bytes"] > 0
        assert metric(client, "gpusync_pulls_in_flight") == 0


def test_a_failed_pull_is_400_with_the_errors_values(stream: wire.Stream) -> None:
    with serving(server.ServerConfig(stream.base)) as client:
        reply = client.post("/pull_weights", json=body(stream, 9))
        assert reply.status_code == 400
        document = reply.json()
        assert document["success"] is False
        assert document["error"] == "SourceNotReadyError"
        assert isinstance(document["message"], str)
        assert (
            metric(client, 'gpusync_failures_total{error="SourceNotReadyError",operation="pull"}')
            == 1
        )
        assert metric(client, "gpusync_pulls_in_flight") == 0
        assert client.post("/pull_weights", json=body(stream, 1)).status_code == 200


def test_no_reply_carries_a_traceback(stream: wire.Stream) -> None:
    def failing(source_dir: str, target_version: int) -> None:
        raise ZeroDivisionError("in the hook")

    with serving(server.ServerConfig(stream.base, pre_read_hook=failing)) as client:
        reply = client.post("/pull_weights", json=body(stream, 1))
        assert reply.status_code == 400
        assert reply.json()["error"] == "SourceNotReadyError"
        assert "Traceback" not in reply.text
        assert "test_server" not in reply.json()["message"].partition("failing")[2]


def test_a_bug_is_500_in_the_same_shape(
    stream: wire.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(server, "pull", broken)
    with serving(server.ServerConfig(stream.base)) as client:
        reply = client.post("/pull_weights", json=body(stream, 1))
        assert reply.status_code == 500
        assert reply.json()["success"] is False
        assert "secret detail" not in reply.text
        assert (
            metric(client, 'gpusync_failures_total{error="ZeroDivisionError",operation="pull"}')
            == 1
        )


def test_a_long_pull_never_blocks_health_and_equal_pulls_are_one(stream: wire.Stream) -> None:
    gate = Gate()
    with (
        serving(server.ServerConfig(stream.base, pre_read_hook=gate)) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        pulls = [pool.submit(client.post, "/pull_weights", json=body(stream, 2)) for _ in range(4)]
        try:
            assert gate.entered.wait(30)
            start = time.monotonic()
            assert client.get("/health").json() == {"status": "ok"}
            assert metric(client, "gpusync_pulls_in_flight") == 1
            assert time.monotonic() - start < 5
            time.sleep(0.5)  # all four are in by now
        finally:
            gate.opened.set()
        documents = [pull.result().json() for pull in pulls]
        assert gate.calls == 1
        assert [document["outcome"] for document in documents] == ["applied"] * 4
        assert documents.count(documents[0]) == 4, "the same result goes to all"
        assert metric(client, 'gpusync_pull_seconds_count{stage="total"}') == 1
    driver.check_at(stream, 2)


def test_pulls_of_two_folders_run_side_by_side(stream: wire.Stream, tmp_path: Path) -> None:
    gate = Gate()
    other = {**body(stream, 2), "local_checkpoint_dir": str(tmp_path / "other")}
    with (
        serving(server.ServerConfig(stream.base, pre_read_hook=gate)) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        pulls = [
            pool.submit(client.post, "/pull_weights", json=asked)
            for asked in (body(stream, 2), other)
        ]
        try:
            deadline = time.monotonic() + 30
            while gate.calls < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert metric(client, "gpusync_pulls_in_flight") == 2
        finally:
            gate.opened.set()
        assert [pull.result().status_code for pull in pulls] == [200, 200]
    driver.check_at(stream, 2)
    driver.check_at(stream, 2, tmp_path / "other")


def test_a_caller_that_goes_away_does_not_end_the_pull(stream: wire.Stream) -> None:
    gate = Gate()
    with serving(server.ServerConfig(stream.base, pre_read_hook=gate)) as client:
        try:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/pull_weights", json=body(stream, 2), timeout=0.5)
            assert gate.entered.is_set()
        finally:
            gate.opened.set()
        reply = client.post("/pull_weights", json=body(stream, 2))
        assert reply.status_code == 200
        assert gate.calls <= 2
    driver.check_at(stream, 2)


# ---- requests that are refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"local_checkpoint_dir": "/a"}',
        b'{"local_checkpoint_dir": "/a", "source_dir": "/b", "target_version": "1"}',
        b'{"local_checkpoint_dir": "/a", "source_dir": "/b", "target_version": true}',
        b'{"local_checkpoint_dir": "/a", "source_dir": "/b", "target_version": 1.0}',
        b'{"local_checkpoint_dir": "/a", "source_dir": "/b", "target_version": -1}',
        b'{"local_checkpoint_dir": "/a", "source_dir": "/b", "target_version": 1e400}',
        b'{"local_checkpoint_dir": "/a", "source_dir": "/b", "target_version": NaN}',
        b'{"local_checkpoint_dir": "/a", "source_dir": "/b", "target_version": '
        + b"9" * 5000
        + b"}",
        b'{"local_checkpoint_dir": 1, "source_dir": "/b", "target_version": 1}',
        b'{"local_checkpoint_dir": null, "source_dir": "/b", "target_version": 1}',
        b'{"local_checkpoint_dir": "relative", "source_dir": "/b", "target_version": 1}',
        b'{"local_checkpoint_dir": "", "source_dir": "/b", "target_version": 1}',
        b'{"local_checkpoint_dir": "/a\\u0000", "source_dir": "/b", "target_version": 1}',
        b'{"local_checkpoint_dir": "/\\ud800", "source_dir": "/b", "target_version": 1}',
        b'{"local_checkpoint_dir": "/a", "local_checkpoint_dir": "/c", "source_dir": "/b", "target_version": 1}',
        b"\xff\xfe{}",
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b'{"x": "' + b"y" * (64 * 1024) + b'"}',
    ],
    ids=lambda data: data[:40].decode("latin-1") + f" {len(data)}",
)
def test_a_bad_body_is_400(refusing: Any, data: bytes) -> None:
    reply = refusing.post("/pull_weights", content=data)
    assert reply.status_code == 400
    document = reply.json()
    assert document["success"] is False
    assert isinstance(document["message"], str)
    assert "Traceback" not in reply.text


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a server whose base is not there: no request here may get as far as using it."""
    with serving(server.ServerConfig(tmp_path_factory.mktemp("server") / "absent")) as client:
        yield client


def test_a_body_without_an_end_is_cut_off(refusing: Any) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * 4096

    reply = refusing.post("/pull_weights", content=endless())
    assert reply.status_code == 400
    assert "65536" in reply.json()["message"]


def test_other_paths_and_methods_keep_the_body_shape(refusing: Any) -> None:
    for reply, status in (
        (refusing.get("/pull_weights"), 405),
        (refusing.get("/no/such/path"), 404),
    ):
        assert reply.status_code == status
        assert reply.json()["success"] is False


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        TOKEN,
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        "Bearer \xff",
    ],
)
def test_without_the_token_it_is_401(stream: wire.Stream, header: str | None) -> None:
    with serving(server.ServerConfig(stream.base, token=TOKEN)) as client:
        headers = {} if header is None else {"Authorization": header.encode("utf-8")}
        reply = client.post("/pull_weights", json=body(stream, 1), headers=headers)
        assert reply.status_code == 401
        assert reply.json()["success"] is False
        assert client.get("/health").status_code == 200
    assert not stream.local.exists()


def test_the_log_says_what_was_refused_and_what_failed(
    stream: wire.Stream, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(server.ServerConfig(stream.base, token=TOKEN)) as client:
        client.post("/pull_weights", json=body(stream, 1))
        headers = {"Authorization": f"Bearer {TOKEN}".encode()}
        client.post("/pull_weights", json=body(stream, 9), headers=headers)
    refused, failed = [line for line in caplog.messages if line.startswith("pull_")]
    assert refused == (
        "pull_refused status=401 client=127.0.0.1 message=a valid bearer token is required"
    )
    assert failed.startswith(
        f"pull_failed error=SourceNotReadyError target_version=9 folder={stream.local} message="
    )


def test_with_the_token_it_pulls(stream: wire.Stream) -> None:
    with serving(server.ServerConfig(stream.base, token=TOKEN)) as client:
        headers = {"Authorization": f"Bearer {TOKEN}".encode()}
        assert (
            client.post("/pull_weights", json=body(stream, 1), headers=headers).status_code == 200
        )


@pytest.mark.parametrize("key", ["local_checkpoint_dir", "source_dir"])
def test_a_folder_outside_the_roots_is_403(stream: wire.Stream, tmp_path: Path, key: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (stream.root / "link").symlink_to(outside)
    config = server.ServerConfig(stream.base, roots=(stream.root,))
    with serving(config) as client:
        for path in (
            outside,
            stream.root / "link",
            stream.root / "link" / "deeper",
            f"{stream.root}/../outside",
            f"{stream.root}side",
            "/",
        ):
            reply = client.post("/pull_weights", json={**body(stream, 1), key: str(path)})
            assert reply.status_code == 403, path
            assert reply.json()["success"] is False
        assert list(outside.iterdir()) == []
        assert client.post("/pull_weights", json=body(stream, 1)).status_code == 200


def test_roots_are_compared_with_links_resolved(stream: wire.Stream, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(stream.root)
    with serving(server.ServerConfig(stream.base, roots=(tmp_path / "alias",))) as client:
        assert client.post("/pull_weights", json=body(stream, 1)).status_code == 200


# ---- the process ---------------------------------------------------------------------------------------------


@contextmanager
def served(
    stream: wire.Stream, *options: str, **environ: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``gpusync serve`` as a process; yield it and its URL."""
    command = [sys.executable, "-m", "gpusync.cli", "serve", "--base-dir", str(stream.base)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--json", *options],
        stdout=subprocess.PIPE,
        text=True,
        cwd=driver.REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{driver.REPOSITORY}:{stream.root}", **environ},
    )
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert first["success"] is True
        yield process, f"http://{first['host']}:{first['port']}"
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def test_sigterm_stops_a_pull_at_a_safe_point_and_exits_with_0(stream: wire.Stream) -> None:
    driver.pull(stream, 1)
    before = wire.snapshot(stream.local)
    (stream.root / "slowhook.py").write_text(
        "import pathlib, time\n"
        "def wait(source_dir, target_version):\n"
        "    pathlib.Path(source_dir, '..', 'entered').touch()\n"
        "    time.sleep(2)\n"
    )
    with (
        served(stream, "--pre-read-hook", "slowhook:wait") as (process, url),
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(
            httpx.post, f"{url}/pull_weights", json=body(stream, 2), timeout=60, trust_env=False
        )
        wait_for(lambda: (stream.root / "entered").exists())
        process.send_signal(signal.SIGTERM)
        reply = asked.result()
        assert reply.status_code == 400
        assert reply.json()["error"] == "Stopped"
        assert "safe point" in reply.json()["message"]
        assert process.wait(30) == 0
    assert wire.snapshot(stream.local) == before
    assert driver.pull(stream, 2).outcome == "applied"
    driver.check_at(stream, 2)


def test_serve_takes_token_and_roots_from_the_command_line(
    stream: wire.Stream, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("s3cret\n")
    options = ("--root", str(stream.root), "--token-file", str(token_file))
    with (
        served(stream, *options) as (process, url),
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        assert client.post("/pull_weights", json=body(stream, 1)).status_code == 401
        headers = {"Authorization": "Bearer s3cret"}
        outside = {**body(stream, 1), "local_checkpoint_dir": str(tmp_path / "elsewhere")}
        assert client.post("/pull_weights", json=outside, headers=headers).status_code == 403
        assert (
            client.post("/pull_weights", json=body(stream, 1), headers=headers).status_code == 200
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    driver.check_at(stream, 1)


def test_the_command_line_gives_the_timeouts_to_every_pull(stream: wire.Stream) -> None:
    stream.hide(2)
    options = ("--visibility-timeout", "60", "--lock-timeout", "0.2")
    with (
        served(stream, *options) as (_, url),
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        early = pool.submit(
            httpx.post, f"{url}/pull_weights", json=body(stream, 2), timeout=60, trust_env=False
        )
        lock = stream.local / ".weight_sync" / "lock"
        wait_for(lambda: lock.exists() and lock.stat().st_size > 0)  # the holder's pid is in it
        other = client.post("/pull_weights", json=body(stream, 1))
        assert other.json()["error"] == "LockTimeoutError"
        assert not early.done()
        stream.show(2)
        assert early.result().json()["to_version"] == 2


def test_a_port_that_is_taken_is_a_usage_error(stream: wire.Stream) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "gpusync.cli", "serve", "--base-dir", str(stream.base)]
        done = subprocess.run(
            [*command, "--port", port],
            capture_output=True,
            text=True,
            cwd=driver.REPOSITORY,
            timeout=60,
        )
    assert done.returncode == 2
    assert "cannot listen" in done.stderr
