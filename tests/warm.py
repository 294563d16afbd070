"""Python processes that have torch imported already: forks of one that waits, each running the code it is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, as subprocess gives it, and what it wrote."""

    code: int
    out: str
    errors: str

    def json(self) -> Any:
        assert self.code == 0, self.errors
        return json.loads(self.out)


class Running:
    """One fork that may still run. Its standard input is empty."""

    def __init__(self, pid: int, warm: Warm, folder: Path) -> None:
        self.pid = pid
        self._warm = warm
        self._folder = folder

    def wait(self) -> Ended:
        code = self._warm.ask(wait=self.pid)
        out, errors = ((self._folder / name).read_text() for name in ("out", "errors"))
        return Ended(code, out, errors)


class Warm:
    """A process to fork; ``imports`` are the modules that it imports first."""

    def __init__(self, *imports: str) -> None:
        self._root = tempfile.TemporaryDirectory(prefix="gpusync-warm-")
        self._started = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )

    def start(self, code: str, *arguments: object, **environment: str) -> Running:
        """Fork a process that runs ``code`` as its main module, and ends as Python does."""
        self._started += 1
        folder = Path(self._root.name) / str(self._started)
        folder.mkdir()
        for name in ("out", "errors"):
            (folder / name).touch()
        argv = ["-c", *map(str, arguments)]
        pid = self.ask(code=code, argv=argv, folder=str(folder), environment=environment)
        return Running(pid, self, folder)

    def run(self, code: str, *arguments: object, **environment: str) -> Ended:
        return self.start(code, *arguments, **environment).wait()

    def ask(self, **request: Any) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
        self._root.cleanup()


def serve() -> None:
    """Answer requests until standard input ends; in a fork, run what was asked for."""
    for name in sys.argv[1:]:
        __import__(name)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                become(**request)
                return
        print(answer, flush=True)


def become(code: str, argv: list[str], folder: str, environment: dict[str, str]) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for fd, name in ((1, "out"), (2, "errors")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY), fd)
    sys.argv = argv
    os.environ.update(environment)
    exec(compile(code, "<forked>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    serve()
