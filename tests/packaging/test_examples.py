"""The examples run, as a reader would run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import gpusync
from tests.live import bytes_of, model_from


def run_example(repository: Path, name: str, *args: str) -> str:
    """Run an example in a process of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(repository / "docs" / "examples" / name), *args],
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plain_torch_loop(repository: Path, tmp_path: Path) -> None:
    printed = run_example(repository, "torch_loop.py", str(tmp_path / "run"), "--steps", "3")
    assert printed.splitlines()[-1] == "trainer, live model and restarted host agree at version 3"


class _Engine(BaseHTTPRequestHandler):
    """The three calls of an engine that gpusync is mounted in; ``server.module`` is what it serves."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked: list[str] = self.server.asked  # type: ignore[attr-defined]
        asked.append(self.path)
        if self.path == "/update_weights_from_disk":
            folder, version = Path(body["model_path"]), int(body["weight_version"])
            source, base = folder.with_name("published"), folder.with_name("base")
            if self.server.module is None:  # type: ignore[attr-defined]
                self.server.module = model_from(base)  # type: ignore[attr-defined]
            with gpusync.open_chain(source, version, checkpoint=folder, base_dir=base) as chain:
                gpusync.apply_to_model(self.server.module, chain)  # type: ignore[attr-defined]
        reply = b'{"success": true, "message": ""}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_trainer_has_hosts_follow_over_http(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra server)")
    shared = tmp_path / "shared"
    (shared / "base").mkdir(parents=True)
    command = ["serve", "--base-dir", str(shared / "base"), "--root", str(shared), "--port", "0"]
    serve = subprocess.Popen(
        [sys.executable, "-m", "gpusync.cli", *command, "--json"],
        env={**os.environ, "PYTHONPATH": str(repository)},
        stdout=subprocess.PIPE,
        text=True,
    )
    engine = ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    engine.module, engine.asked = None, []  # type: ignore[attr-defined]
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    try:
        assert serve.stdout is not None
        port = json.loads(serve.stdout.readline())["port"]
        urls = ["--receiver", f"http://127.0.0.1:{port}"]
        urls += ["--engine", f"http://127.0.0.1:{engine.server_port}"]
        run_example(repository, "http_trainer.py", str(shared), *urls, "--steps", "2")
    finally:
        serve.terminate()
        serve.wait(30)
        engine.shutdown()
        engine.server_close()
        if serve.stdout is not None:
            serve.stdout.close()
    trained = bytes_of(model_from(shared / "trained"))
    assert bytes_of(engine.module) == trained  # type: ignore[attr-defined]
    assert bytes_of(model_from(shared / "local-0")) == trained
    calls = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert engine.asked == 2 * calls  # type: ignore[attr-defined]
