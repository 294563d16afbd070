"""The HTTP server: ``POST /pull_weights`` as slime's and miles's trainers call it, ``/health``, ``/metrics``.

Every reply to ``/pull_weights`` is ``{"success": bool, "message": str, ...}``: 200 with the report, 400 with the
error, 401 without the token, 403 outside the roots or from a web page; docs/openapi.json describes it. A pull runs in a worker thread; the event loop only waits.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from gpusync.errors import FormatError, GpuSyncError
from gpusync.format.jsontext import parse_json_object
from gpusync.local.pull import pull
from gpusync.metrics import CONTENT_TYPE, Metrics
from gpusync.outcome import (
    StopFlag,
    Stopped,
    describe_pull,
    error_document,
    success_document,
)
from gpusync.published.hook import PreReadHook
from gpusync.server.connections import BoundedProtocol
from gpusync.types import PullReport

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024
MAX_PULLS = 8

# An absolute path as messages write one; a date or a ratio has a digit before its slash.
_PATH = re.compile(r"(?<![\w.)])/[^\s'\",;:\]]+")


@dataclass(frozen=True)
class ServerConfig:
    """What a server may do, and for whom.

    Parameters
    ----------
    base_dir
        The engine's own base checkpoint, version 0.
    roots
        Folders that ``local_checkpoint_dir`` and ``source_dir`` must lie in, links resolved; empty allows any.
    token
        Demanded as ``Authorization: Bearer <token>`` by ``/pull_weights``; None demands nothing.
    pre_read_hook
        Called before published bytes are read.
    durable
        Whether a pull fsyncs what it writes.
    visibility_timeout_seconds, lock_timeout_seconds
        How long a pull waits for versions that are not visible yet, and for the folder's lock.
    """

    base_dir: Path
    roots: tuple[Path, ...] = ()
    token: str | None = None
    pre_read_hook: PreReadHook | None = None
    durable: bool = True
    visibility_timeout_seconds: float = 0.0
    lock_timeout_seconds: float = 600.0


@dataclass(frozen=True)
class PullRequest:
    """A validated body of ``/pull_weights``. Equal requests that are in flight together are one pull."""

    local_checkpoint_dir: str
    source_dir: str
    target_version: int


class RequestError(Exception):
    """The request was refused before any work; ``status`` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PullService:
    """Runs pulls in worker threads, equal ones once, and stops them at safe points."""

    def __init__(self, config: ServerConfig, metrics: Metrics, stop: StopFlag) -> None:
        self._config = config
        self._metrics = metrics
        self._stop = stop
        self._pool = ThreadPoolExecutor(MAX_PULLS, thread_name_prefix="gpusync-pull")
        self._running: dict[PullRequest, asyncio.Future[PullReport]] = {}
        metrics.count_in_flight(lambda: len(self._running))

    async def pull(self, request: PullRequest) -> PullReport:
        """Return the report of this pull, or of an equal one that is already in flight.

        A caller that goes away does not end the pull: others may wait for it, and half a pull helps nobody.
        """
        future = self._running.get(request)
        if future is None:
            future = asyncio.get_running_loop().run_in_executor(self._pool, self._run, request)
            self._running[request] = future
            future.add_done_callback(lambda done: self._forget(request, done))
        return await asyncio.shield(future)

    async def close(self) -> None:
        """Ask running pulls to stop, and wait until they have."""
        self._stop.ask()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._pool.shutdown()

    def _run(self, request: PullRequest) -> PullReport:
        self._stop.check()
        try:
            report = pull(
                request.local_checkpoint_dir,
                self._config.base_dir,
                request.source_dir,
                request.target_version,
                self._config.pre_read_hook,
                durable=self._config.durable,
                visibility_timeout_seconds=self._config.visibility_timeout_seconds,
                lock_timeout_seconds=self._config.lock_timeout_seconds,
                progress=self._stop.check,
            )
        except Exception as err:
            self._metrics.failed("pull", err)
            raise
        self._metrics.pulled(report)
        return report

    def _forget(self, request: PullRequest, done: asyncio.Future[PullReport]) -> None:
        del self._running[request]
        if not done.cancelled():
            done.exception()  # retrieved here too: every caller may have gone away


def create_app(config: ServerConfig, stop: StopFlag | None = None) -> Starlette:
    """Return the ASGI application.

    Parameters
    ----------
    config
        What it may do.
    stop
        Asked when the process is to end: running pulls then stop at a safe point. The application asks it itself
        when its lifespan ends.
    """
    metrics = Metrics()
    service = PullService(config, metrics, stop or StopFlag())

    async def pull_weights(request: Request) -> Response:
        asked: PullRequest | None = None
        try:
            check_origin(request.headers.get("origin"))
            check_token(request.headers.get("authorization"), config.token)
            body = await read_body(request)
            # In a thread: resolving links on a mount that hangs must not stop the event loop.
            asked = await asyncio.to_thread(parse_pull_request, body, config.roots)
            report = await service.pull(asked)
        except RequestError as err:
            client = request.client.host if request.client else "unknown"
            log.warning("pull_refused status=%d client=%s message=%s", err.status, client, err)
            return _reply(err.status, error_document(err))
        except (GpuSyncError, Stopped) as err:
            _log_failed(err, asked)
            return _reply(400, _for_callers(error_document(err), asked, config))
        except ClientDisconnect:
            return _reply(400, error_document(RequestError(400, "the body ended too early")))
        except Exception:
            log.exception("pull_failed error=bug")
            message = "internal error; the server's log has the details"
            return _reply(500, {"success": False, "error": "InternalError", "message": message})
        document = success_document(describe_pull(report), report.to_dict())
        return _reply(200, _for_callers(document, asked, config))

    async def health(request: Request) -> Response:
        return _reply(200, {"status": "ok"})

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await service.close()

    return Starlette(
        routes=[
            Route("/pull_weights", pull_weights, methods=["POST"]),
            Route("/health", health),
            Route("/metrics", show_metrics),
        ],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )


# ---- a request, checked ----------------------------------------------------------------------------------


def check_origin(origin: str | None) -> None:
    """Refuse what a web page sends: browsers name its origin, trainers and scripts have none.

    A page that someone on this host opens could otherwise call a server that listens on 127.0.0.1 without a token.
    """
    if origin is not None:
        raise RequestError(403, "requests of web pages are refused")


def check_token(header: str | None, token: str | None) -> None:
    """Refuse a request whose ``Authorization`` header is not ``Bearer <token>``, in constant time."""
    if token is None:
        return
    scheme, _, given = (header or "").partition(" ")
    # Header bytes come decoded as Latin-1; the token file is UTF-8.
    same = hmac.compare_digest(given.strip().encode("latin-1"), token.encode("utf-8"))
    if scheme.lower() != "bearer" or not same:
        raise RequestError(401, "a valid bearer token is required")


async def read_body(request: Request) -> bytes:
    """Return the body; reading ends as soon as it is over ``MAX_BODY_BYTES``."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(400, f"the body is over {MAX_BODY_BYTES} bytes")
    return bytes(body)


def parse_pull_request(body: bytes, roots: Sequence[Path]) -> PullRequest:
    """Return the validated request; folders come out absolute with links resolved.

    Raises
    ------
    RequestError
        400 for a body that is not the object above, 403 for a folder outside ``roots``.
    """
    try:
        values = parse_json_object(body, file="body", error=FormatError, what="the request body")
    except FormatError as err:
        raise RequestError(400, err.message) from err
    local = _parse_folder(values, "local_checkpoint_dir", roots)
    source = _parse_folder(values, "source_dir", roots)
    target = values.get("target_version")
    if not isinstance(target, int) or isinstance(target, bool):
        raise RequestError(400, "target_version must be an integer")
    return PullRequest(local, source, target)


def _parse_folder(values: Mapping[str, Any], key: str, roots: Sequence[Path]) -> str:
    text = values.get(key)
    if not isinstance(text, str) or not os.path.isabs(text) or "\0" in text:
        raise RequestError(400, f"{key} must be an absolute path")
    real = Path(os.path.realpath(text))
    if roots and not any(real.is_relative_to(os.path.realpath(root)) for root in roots):
        raise RequestError(403, f"{key} lies outside the folders that this server may use")
    return str(real)


def _log_failed(error: Exception, asked: PullRequest | None) -> None:
    log.warning(
        "pull_failed error=%s target_version=%s folder=%s message=%s",
        type(error).__name__,
        asked and asked.target_version,
        asked and asked.local_checkpoint_dir,
        error,
    )


# ---- replies ---------------------------------------------------------------------------------------------


def _reply(status: int, document: dict[str, Any]) -> Response:
    """Return a JSON response. Escaped to ASCII: a file's name may hold bytes that no UTF-8 has."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    text = json.dumps(document, default=str)
    return Response(text, status, headers, media_type="application/json")


def _for_callers(
    document: dict[str, Any], asked: PullRequest | None, config: ServerConfig
) -> dict[str, Any]:
    """Cut what only the log should say: a hook's traceback, and paths that the caller did not name.

    The traceback is all that follows the message's first line.
    """
    named = (asked.local_checkpoint_dir, asked.source_dir) if asked is not None else ()
    bases = {str(config.base_dir), os.path.realpath(config.base_dir)}

    def cut(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: cut(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [cut(item) for item in value]
        return _cut_paths(value, named, bases) if isinstance(value, str) else value

    plain = cut(document)
    plain["message"] = plain["message"].partition("\n")[0]
    return plain  # type: ignore[no-any-return]


def _cut_paths(text: str, named: Sequence[str], bases: Iterable[str]) -> str:
    for base in sorted(bases, key=len, reverse=True):
        if not any(folder.startswith(base) for folder in named):
            text = text.replace(base, "(base_dir)")

    def cut(match: re.Match[str]) -> str:
        path = match[0]
        return path if any(path.startswith(folder) for folder in named) else "(a path)"

    return _PATH.sub(cut, text)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods in the same body shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "internal error"
    document = {"success": False, "error": "RequestError", "message": detail}
    return _reply(status, document)


# ---- the process -----------------------------------------------------------------------------------------


class _StoppableServer(uvicorn.Server):
    """A uvicorn server that tells running pulls to stop as soon as the signal is there.

    uvicorn first waits for open requests and only then ends the application's lifespan; the pull behind an open
    request must hear of it before.
    """

    def __init__(self, config: uvicorn.Config, stop: StopFlag) -> None:
        super().__init__(config)
        self._stop = stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stop.ask()
        super().handle_exit(sig, frame)


def serve(config: ServerConfig, host: str, port: int, ready: Callable[[int], None]) -> None:
    """Serve until SIGINT or SIGTERM, then stop running pulls at a safe point and return.

    Parameters
    ----------
    config
        What the server may do.
    host, port
        Where to listen; port 0 takes a free one.
    ready
        Called once with the port, when it is bound.

    Raises
    ------
    OSError
        The address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    stop = StopFlag()
    # uvicorn raises the signal again after a clean shutdown; it then finds these handlers and the process goes on.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.ask())
    settings = uvicorn.Config(
        create_app(config, stop), http=BoundedProtocol, ws="none", log_config=None, access_log=False
    )
    ready(listener.getsockname()[1])
    _StoppableServer(settings, stop).run(sockets=[listener])
