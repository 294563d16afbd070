"""What SGLang's callers may ask for, and which configurations are refused; without SGLang."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gpusync
from gpusync.engines.sglang_requests import (
    Request,
    encode_message,
    merge_payload,
    parse_message,
    parse_path,
    parse_request,
    takes,
)
from gpusync.engines.sglang_weights import check_derived, option, why_not


def local_checkpoint(folder: Path, text: str = '{"version": "000007"}') -> str:
    (folder / ".weight_sync").mkdir(parents=True)
    (folder / ".weight_sync" / "state.json").write_text(text)
    return str(folder)


def test_which_updates_are_taken(tmp_path: Path) -> None:
    local = local_checkpoint(tmp_path / "local")
    unfinished = local_checkpoint(tmp_path / "unfinished", "{}")
    assert takes("/anything", "gpusync", "")
    assert takes(local, "auto", "/run") and takes(local, None, "/run")
    assert not takes(local, "auto", "")
    assert not takes(local, "safetensors", "/run")
    assert not takes(unfinished, "auto", "/run")
    assert not takes(str(tmp_path), "auto", "/run")
    assert not takes("/run/weight_v000007", "auto", "/run")
    assert not takes("a\0path", "auto", "/run")


def test_what_a_path_asks_for(tmp_path: Path) -> None:
    local = local_checkpoint(tmp_path / "local")
    assert parse_path("/run/weight_v000007/", "") == Request(source_dir="/run", target_version=7)
    assert parse_path(local, "/run") == Request(
        source_dir="/run", target_version=7, checkpoint=local
    )
    text = ' {"source_dir": "/run", "target_version": 0, "write_back": "none"}'
    assert parse_path(text, "/other") == Request(
        source_dir="/run", target_version=0, options={"write_back": "none"}
    )
    for path, says in ((local, "set GPUSYNC_SOURCE_DIR"), (str(tmp_path), "is no JSON request")):
        with pytest.raises(gpusync.DeviceError, match=says):
            parse_path(path, "")
    with pytest.raises(gpusync.SourceNotReadyError, match="is not a path"):
        parse_path("a\0path", "")


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({}, "needs source_dir"),
        ({"source_dir": "/run"}, "needs target_version"),
        ({"source_dir": "/run", "target_version": True}, "target_version of a request is no int"),
        ({"source_dir": "/run", "target_version": "7"}, "is no int"),
        ({"source_dir": 7, "target_version": 7}, "source_dir of a request is no str"),
        (
            {"source_dir": "/run", "target_version": 7, "durable": 1},
            "durable of a request is no bo",
        ),
        ({"phase": "finish"}, "the phase is none of apply, prepare"),
        ({"phase": "discard", "pre_read_hook": "os:abort"}, "has no 'pre_read_hook'"),
        ({"phase": "discard", "group": "x"}, "has no 'group'"),
    ],
)
def test_requests_that_are_refused(document: dict[str, Any], says: str) -> None:
    with pytest.raises(gpusync.DeviceError, match=says):
        parse_request(document)


def test_messages() -> None:
    values = {"source_dir": "/run", "target_version": 7, "visibility_timeout_seconds": 2}
    message = encode_message(**values)
    assert message[0][1].dtype == torch.uint8
    expected = Request(
        source_dir="/run", target_version=7, options={"visibility_timeout_seconds": 2}
    )
    assert parse_message(message) == expected == parse_message(iter(message))
    text = json.dumps(values).encode()
    bad = [
        [],
        message * 2,
        [("model.weight", message[0][1])],
        [("gpusync", torch.zeros(4))],
        [("gpusync", torch.zeros(2, 2, dtype=torch.uint8))],
        [("gpusync", torch.zeros(70_000, dtype=torch.uint8))],
        [("gpusync", message[0][1][:-1])],
        [
            (
                "gpusync",
                torch.tensor([*text[:-1], *b', "phase": "apply", "phase": "attach"}']).byte(),
            )
        ],
        [("gpusync", "text")],
    ]
    for named in bad:
        with pytest.raises(gpusync.DeviceError):
            parse_message(named)


def test_payloads() -> None:
    first = {"source_dir": "/run", "write_back": "none"}
    assert merge_payload(first, {"target_version": 7}).target_version == 7
    assert merge_payload(first, {"phase": "commit"}).options == {"write_back": "none"}
    assert merge_payload(None, {"phase": "discard"}) == Request("discard")
    for payload in ([], "x", 7):
        with pytest.raises(gpusync.DeviceError, match="a payload is no JSON object"):
            merge_payload(first, payload)


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Server arguments as releases before 0.5.23 keep them."""
    given: dict[str, Any] = {"pp_size": 1, "cpu_offload_gb": 0, "weight_cache_mode": "off"}
    module = SimpleNamespace(get_global_server_args=lambda: SimpleNamespace(**given))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.delitem(sys.modules, "sglang.srt.runtime_context", raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", module)
    return given


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("pp_size", 2, "--pp-size 1"),
        ("speculative_algorithm", "EAGLE", "without --speculative-algorithm"),
        ("enable_eplb", True, "--enable-eplb"),
        ("elastic_ep_backend", "mooncake", "--elastic-ep-backend"),
        ("enable_lora", True, "--enable-lora"),
        ("lora_paths", ["x"], "--lora-paths"),
        ("cpu_offload_gb", 4, "--cpu-offload-gb"),
        ("offload_group_size", 2, "--offload-group-size"),
        ("weight_cache_mode", "server", "--weight-cache-mode off"),
    ],
)
def test_configurations_that_are_refused(
    name: str, value: Any, says: str, arguments: dict[str, Any]
) -> None:
    assert why_not(nn.Linear(1, 1)) is None
    arguments[name] = value
    assert says in (why_not(nn.Linear(1, 1)) or "")


def test_models_that_are_refused(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = nn.Module()
    wrapped.base_layer, wrapped.lora_backend = nn.Linear(1, 1), object()
    assert "wrapped for LoRA" in (why_not(wrapped) or "")
    arguments["speculative_algorithm"] = "NGRAM"  # has no model
    assert why_not(nn.Linear(1, 1)) is None
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater"
    own = SimpleNamespace(_unsupported_derived_weight_cache_error=lambda model: "their reason")
    monkeypatch.setitem(sys.modules, updater, own)
    assert why_not(nn.Linear(1, 1)) == "their reason"


def test_options_are_read_where_this_release_keeps_them(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (option("pp_size"), option("unknown")) == (1, None)

    def leaf(name: str) -> Any:
        if name != "pp_size":
            raise ValueError(name)
        return 4

    context = SimpleNamespace(get_context=lambda: SimpleNamespace(config_leaf=leaf))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    assert (option("pp_size"), option("cpu_offload_gb")) == (4, None)


def test_tensors_with_derived_copies_raise() -> None:
    model = nn.Module()
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    check_derived(model, name)
    model.kv_b_proj, model.w_kc = nn.Linear(1, 1), None
    check_derived(model, "model.layers.0.self_attn.o_proj.weight")
    for refused in (name, "model.layers.0.self_attn.attn.k_scale"):
        with pytest.raises(gpusync.PlacementError, match="reload the model"):
            check_derived(model, refused)
