"""Arrays to and from a device's memory, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from gpusync.device.runtime import Runtime


def upload(runtime: Runtime, array: NDArray[Any], *, shift: int = 0) -> torch.Tensor:
    """Return a copy of an array's bytes in device memory, ``shift`` bytes behind an address aligned to 256."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    target = runtime.empty(shift + data.size)[shift:]
    if data.size:
        stream = runtime.stream()
        # a writable copy: torch warns of memory that it may not write
        stream.copy(target, torch.from_numpy(data.copy()))
        stream.synchronize()
    return target


def zeros(runtime: Runtime, nbytes: int) -> torch.Tensor:
    """Return device memory of zeros."""
    return upload(runtime, np.zeros(nbytes, np.uint8))


def download(runtime: Runtime, tensor: torch.Tensor, dtype: DTypeLike = np.uint8) -> NDArray[Any]:
    """Wait for all queued work, and return a copy of device memory as a flat array."""
    runtime.synchronize()
    host = torch.empty(tensor.numel(), dtype=torch.uint8)
    if tensor.numel():
        stream = runtime.stream()
        stream.copy(host, tensor)
        stream.synchronize()
    return host.numpy().view(dtype)
