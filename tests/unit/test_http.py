"""The server as a hostile network sees it: a real process, real sockets, its OpenAPI description held against it."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

httpx = pytest.importorskip("httpx", reason="httpx is not installed (extra dev)")
pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra server)")

from gpusync import errors  # noqa: E402
from gpusync.metrics import CONTENT_TYPE  # noqa: E402
from gpusync.server import app as server  # noqa: E402
from gpusync.server import connections  # noqa: E402
from tests import wire  # noqa: E402
from tests.unit.strategies import fixed  # noqa: E402
from tests.unit.test_server import body, served, serving  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
OPENAPI: dict[str, Any] = json.loads((REPOSITORY / "docs" / "openapi.json").read_bytes())
SCHEMAS = OPENAPI["components"]["schemas"]


@pytest.fixture
def stream(tmp_path: Path) -> wire.Stream:
    """A tiny base checkpoint with two published versions, and no local folder."""
    made = wire.Stream(tmp_path / "stream")
    made.delta()
    made.delta()
    return made


# ---- the description, held against the code ----------------------------------------------------------


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """True where a JSON value fits a schema, of the few words that the description uses."""
    if "$ref" in schema:
        return fits(value, SCHEMAS[schema["$ref"].rpartition("/")[2]])
    kinds = {"object": dict, "string": str, "integer": int, "null": type(None)}
    allowed = schema.get("type", [])
    allowed = [allowed] if isinstance(allowed, str) else allowed
    if allowed and not any(
        isinstance(value, kinds[kind]) and not isinstance(value, bool) for kind in allowed
    ):
        return False
    if ("const" in schema and value is not schema["const"] and value != schema["const"]) or (
        "enum" in schema and value not in schema["enum"]
    ):
        return False
    if "minimum" in schema and value < schema["minimum"]:
        return False
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    return all(key in value for key in schema.get("required", [])) and all(
        fits(value[key], inner)
        for key, inner in schema.get("properties", {}).items()
        if key in value
    )


def check_described(method: str, path: str, reply: Any) -> None:
    """The reply's status is described for this method and path, and its body fits what is described for it."""
    responses = OPENAPI["paths"][path][method]["responses"]
    assert str(reply.status_code) in responses, f"{method} {path}: {reply.status_code} {reply.text}"
    content = responses[str(reply.status_code)]["content"]
    assert reply.headers["content-type"].partition(";")[0] in content
    for kind, described in content.items():
        if kind == "application/json":
            assert fits(reply.json(), described["schema"]), reply.text


def test_the_description_names_every_route_and_method() -> None:
    app = server.create_app(server.ServerConfig(Path("/nowhere")))
    routes = {route.path: route.methods - {"HEAD"} for route in app.routes}  # type: ignore[attr-defined]
    described = {
        path: {method.upper() for method in methods} for path, methods in OPENAPI["paths"].items()
    }
    assert described == routes
    assert (
        CONTENT_TYPE.partition(";")[0]
        in OPENAPI["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    )


def test_the_description_names_every_error_that_a_pull_can_end_in() -> None:
    def below(kind: type[errors.GpuSyncError]) -> Iterator[type[errors.GpuSyncError]]:
        for child in kind.__subclasses__():
            if child.__module__ == errors.__name__:
                yield child
                yield from below(child)

    live_only = {
        "DeviceError",
        "DecodeError",
        "KernelError",
        "PlacementError",
        "ModelPoisonedError",
    }
    own = {"RequestError", "InternalError", "Stopped"}
    names = {kind.__name__ for kind in below(errors.GpuSyncError)} - live_only
    assert set(SCHEMAS["Failure"]["properties"]["error"]["enum"]) == names | own
    assert (
        str(server.MAX_BODY_BYTES)
        in OPENAPI["paths"]["/pull_weights"]["post"]["responses"]["400"]["description"]
    )


def test_the_description_names_what_a_request_must_hold() -> None:
    described = SCHEMAS["PullRequest"]
    assert (
        set(described["required"])
        == set(described["properties"])
        == set(server.PullRequest.__annotations__)
    )


# ---- any request -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, wire.Stream]]:
    """A client of a real process that may use one folder, in which a version is published."""
    made = wire.Stream(tmp_path_factory.mktemp("guarded") / "stream")
    made.delta()
    with (
        served(made, "--root", str(made.root)) as (process, url),
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        yield client, made
        assert process.poll() is None, "the server died"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = tuple(SCHEMAS["PullRequest"]["required"])


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], bool]:
    """(body, keep): a good body with up to two values bent, left out or added; paths are below ROOT or anywhere."""
    text = {
        "local_checkpoint_dir": draw(
            st.sampled_from(
                ("ROOT/local", "ROOT", "ROOT/../x", "/", "/etc", "/proc/self/root", "ROOT/base")
            )
        ),
        "source_dir": draw(
            st.sampled_from(
                ("ROOT/published", "ROOT/none", "/dev", "/proc/self/fd", "ROOT/base/config.json")
            )
        ),
        "target_version": draw(st.sampled_from((0, 1, 2, 10**18, 2**64, -1))),
    }
    bent: dict[str, Any] = dict(text)
    for _ in range(draw(st.integers(0, 2))):
        key = draw(st.sampled_from((*KEYS, "x")))
        if draw(st.booleans()):
            bent[key] = draw(JSON)
        else:
            bent.pop(key, None)
    return bent, bent == text


@fixed
@given(requests())
def test_any_json_gets_a_described_reply(
    guarded: tuple[Any, wire.Stream], asked: tuple[dict[str, Any], bool]
) -> None:
    client, made = guarded
    values = {
        key: value.replace("ROOT", str(made.root)) if isinstance(value, str) else value
        for key, value in asked[0].items()
    }
    reply = client.post(
        "/pull_weights",
        content=json.dumps(values).encode("utf-8", "surrogatepass"),
        headers={"content-type": "application/json"},
    )
    check_described("post", "/pull_weights", reply)
    assert reply.status_code < 500, reply.text
    if not fits(values, SCHEMAS["PullRequest"]):
        assert reply.status_code in (400, 403), reply.text
    assert "Traceback" not in reply.text


@fixed
@given(st.binary(max_size=300), st.sampled_from(("", "application/json", "text/plain", "\xff")))
def test_any_bytes_as_a_body_get_a_described_reply(
    guarded: tuple[Any, wire.Stream], data: bytes, kind: str
) -> None:
    client, _ = guarded
    reply = client.post(
        "/pull_weights", content=data, headers={"content-type": kind.encode("latin-1")}
    )
    check_described("post", "/pull_weights", reply)
    assert reply.status_code == 400


def raw_request(port: int, data: bytes) -> bytes:
    """Send bytes to the server, end our side, and return all it says."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as peer:
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: peer.recv(65536), b""))


LINES = (
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /pull_weights HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /pull_weights HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
)
ODD = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET  /health\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
    b"GET /%00%ff%2e%2e/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://other/health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /pull_weights HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /pull_weights HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999999999999999\r\n\r\n{}",
    b"POST /pull_weights HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /pull_weights HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    b"POST /pull_weights HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /pull_weights HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
)


@st.composite
def raw_requests(draw: st.DrawFn) -> bytes:
    """A good request with some of its bytes changed, cut or repeated."""
    data = bytearray(draw(st.sampled_from(LINES)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.integers(0, 3))
        if kind == 0 and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif kind == 1:
            data[at:at] = draw(st.binary(min_size=1, max_size=5))
        elif kind == 2:
            del data[at : at + draw(st.integers(1, 9))]
        else:
            data = data[:at]
            break
    return bytes(data)


def check_raw(guarded: tuple[Any, wire.Stream], data: bytes) -> None:
    client, _ = guarded
    said = raw_request(client.base_url.port, data)
    for status in re.findall(rb"HTTP/1\.[01] (\d+)", said):
        assert int(status) < 500, said[:300]
    assert b"Traceback" not in said
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("data", ODD, ids=lambda data: data[:60].decode("latin-1"))
def test_malformed_http_never_gets_a_5xx(guarded: tuple[Any, wire.Stream], data: bytes) -> None:
    check_raw(guarded, data)


@fixed
@given(raw_requests())
def test_bent_http_never_gets_a_5xx(guarded: tuple[Any, wire.Stream], data: bytes) -> None:
    check_raw(guarded, data)


def test_a_web_page_cannot_pull(stream: wire.Stream) -> None:
    with serving(server.ServerConfig(stream.base)) as client:
        headers = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
        reply = client.post("/pull_weights", content=json.dumps(body(stream, 1)), headers=headers)
        check_described("post", "/pull_weights", reply)
        assert reply.status_code == 403
    assert not stream.local.exists()


# ---- what replies say --------------------------------------------------------------------------------


def test_a_reply_names_no_path_that_the_caller_did_not(stream: wire.Stream, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden place" / "base"
    with serving(server.ServerConfig(hidden)) as client:
        reply = client.post("/pull_weights", json=body(stream, 1))
        assert reply.status_code == 400
        assert "base_dir" in reply.text
        assert "hidden place" not in reply.text
    shown = body(stream, 9)["source_dir"]
    with serving(server.ServerConfig(stream.base)) as client:
        reply = client.post("/pull_weights", json=body(stream, 9))
        assert shown in reply.json()["message"], "the caller's own paths stay"


def test_the_latched_base_of_another_pull_is_not_named(stream: wire.Stream, tmp_path: Path) -> None:
    """The base is latched in the marker; who pulls into the folder later need not know where it was."""
    import gpusync

    moved = tmp_path / "secret"
    os.rename(stream.base, moved)
    gpusync.pull(stream.local, moved, stream.source, 1)
    for path in moved.glob("*.safetensors"):
        path.write_bytes(b"")
    (stream.local / wire.FIRST).write_bytes(b"")
    with serving(server.ServerConfig(stream.local)) as client:
        reply = client.post("/pull_weights", json=body(stream, 2))
        assert reply.status_code == 400
        assert str(moved) not in reply.text


def test_latest_as_a_link_shows_nothing_of_other_files(stream: wire.Stream, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    (stream.source / "latest").symlink_to(secret)
    with serving(server.ServerConfig(stream.base)) as client:
        reply = client.post("/pull_weights", json=body(stream, 9))
    assert reply.json()["error"] == "SourceNotReadyError"
    assert "hunter2" not in reply.text


def test_names_that_are_no_utf8_make_no_5xx(stream: wire.Stream) -> None:
    odd = os.fsencode(stream.folder(1)) + b"/x\xff.safetensors"
    with open(odd, "wb") as file:
        file.write(b"stray")
    link = os.fsencode(stream.root) + b"/to\xff"
    os.symlink(stream.source, stream.root / "plain")
    os.mkdir(link)
    with serving(server.ServerConfig(stream.base)) as client:
        reply = client.post("/pull_weights", json=body(stream, 1))
        check_described("post", "/pull_weights", reply)
        assert reply.status_code == 200
        assert "x\\udcff.safetensors" in reply.json()["notes"][0]
        (stream.root / "alias").symlink_to(os.fsdecode(link))
        asked = {**body(stream, 9), "source_dir": str(stream.root / "alias")}
        reply = client.post("/pull_weights", json=asked)
        check_described("post", "/pull_weights", reply)
        assert reply.status_code == 400


def test_a_link_in_the_place_of_the_state_folder_is_refused(
    stream: wire.Stream, tmp_path: Path
) -> None:
    """The roots bind what is written, too: the state folder may not lead out of the local one."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "notes.tmp").write_text("mine")
    stream.local.mkdir()
    (stream.local / ".weight_sync").symlink_to(outside)
    config = server.ServerConfig(stream.base, roots=(stream.root,))
    with serving(config) as client:
        reply = client.post("/pull_weights", json=body(stream, 1))
        assert reply.status_code == 400
        assert reply.json()["error"] == "CheckpointError"
    assert [path.name for path in outside.iterdir()] == ["notes.tmp"]


def test_the_resolved_path_is_what_is_used(stream: wire.Stream, tmp_path: Path) -> None:
    """A link that is turned after the check leads nowhere else: the pull never sees the link."""
    alias = stream.root / "alias"
    alias.symlink_to(stream.source)
    asked = {**body(stream, 1), "source_dir": str(alias)}
    outside = tmp_path / "outside"
    outside.mkdir()

    def turn(source_dir: str, target_version: int) -> None:
        alias.unlink()
        alias.symlink_to(outside)

    config = server.ServerConfig(stream.base, roots=(stream.root,), pre_read_hook=turn)
    with serving(config) as client:
        assert client.post("/pull_weights", json=asked).status_code == 200


# ---- slow and half-open clients ----------------------------------------------------------------------


@contextmanager
def many_sockets(port: int, count: int, first: bytes) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        peers = []
        for _ in range(count):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            peer.sendall(first)
            peers.append(peer)
        yield peers


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"POST /pull_wei",
        b"POST /pull_weights HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n{",
        b"POST /pull_weights HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
    ids=["silent", "half a line", "half a body", "no chunk"],
)
def test_more_slow_clients_than_connections_do_not_keep_health_from_answering(
    guarded: tuple[Any, wire.Stream], first: bytes
) -> None:
    client, _ = guarded
    count = connections.MAX_CONNECTIONS + 80
    with many_sockets(client.base_url.port, count, first) as peers:
        with httpx.Client(base_url=client.base_url, timeout=60, trust_env=False) as fresh:
            assert fresh.get("/health").json() == {"status": "ok"}
        closed = sum(is_closed(peer) for peer in peers)
        assert closed >= 80, "the longest waiting made room"
        assert not all(is_closed(peer) for peer in peers[-50:]), (
            "the newest were not the first to go"
        )


def is_closed(peer: socket.socket) -> bool:
    """True where the other side has closed, or reset, the connection."""
    peer.setblocking(False)
    try:
        return peer.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        peer.setblocking(True)


def test_a_request_that_does_not_arrive_in_time_is_dropped(stream: wire.Stream) -> None:
    code = (
        "import sys, pathlib; from gpusync.server import app as server, connections; connections.REQUEST_SECONDS = 0.5\n"
        "server.serve(server.ServerConfig(pathlib.Path(sys.argv[1])), '127.0.0.1', 0, lambda port: print(port, flush=True))"
    )
    from tests.driver import start_python

    process = start_python(code, stream.base)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        begin = b"POST /pull_weights HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"
        with many_sockets(port, 5, begin) as peers:
            for peer in peers:
                peer.settimeout(30)
                try:
                    assert peer.recv(100) == b""
                except ConnectionResetError:
                    pass
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            assert client.get("/health").status_code == 200
            time.sleep(
                1
            )  # idle between requests is uvicorn's to end, and a new request gets its own time
            assert client.post("/pull_weights", json=body(stream, 1)).status_code == 200
    finally:
        process.kill()
        process.communicate()


def test_a_body_that_breaks_off_is_no_bug(
    stream: wire.Stream, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(server.ServerConfig(stream.base)) as client:
        raw_request(
            client.base_url.port,
            b"POST /pull_weights HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
        )
        assert client.get("/health").status_code == 200
    assert "error=bug" not in caplog.text
