"""Torch modules that hold a checkpoint's tensors under their own names, and the bytes they hold."""

# One test body for every path: "cpu"; "emulated", the CUDA path on host memory; and, marked gpu, "cuda".

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import wire

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


DEVICES = ("cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu))


def need(device: str) -> None:
    """Skip where a device is missing; a missing emulator is a failure where CI runs."""
    if device == "emulated" and shutil.which("g++") is None:
        if os.environ.get("CI"):
            pytest.fail("the emulated device must run in CI, and g++ is not installed")
        pytest.skip("g++ is not installed")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


def tensor_of(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with storage of its own that holds exactly these bytes."""
    out = torch.empty(shape, dtype=DTYPES[dtype])
    if data:
        flat = out.reshape(-1).view(torch.uint8)
        flat.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return out


def place(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Hang a tensor into a module under its dotted name: floats as parameters, the rest as buffers."""
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(model, part):
            model.add_module(part, nn.Module())
        model = getattr(model, part)
    if tensor.is_floating_point():
        model.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        model.register_buffer(leaf, tensor)


def model_from(
    folder: Path, state: Mapping[str, bytes] | None = None, device: str = "cpu"
) -> nn.Module:
    """Build a nested module with the tensors of a checkpoint folder (or with ``state``'s bytes in their place)."""
    need(device)
    model = nn.Module()
    have = wire.read_tensors(folder) if state is None else state
    for path in sorted(folder.glob("*.safetensors")):
        header, _ = wire.raw_header(path)
        for name, entry in header.items():
            if name != "__metadata__":
                shape = tuple(entry["shape"])
                place(model, name, tensor_of(have[name], entry["dtype"], shape))
    return model.to("cuda") if device == "cuda" else model


def bytes_of(model: nn.Module) -> dict[str, bytes]:
    """Return every parameter's and buffer's bytes."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        for name, tensor in named
    }


def pointers_of(model: nn.Module) -> dict[str, int]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in named}
