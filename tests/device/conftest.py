"""Fixtures of the device tests: each runs on the emulated device and, marked gpu, on a CUDA one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
import torch

from gpusync.device.cuda_runtime import cuda_runtime
from gpusync.device.runtime import Runtime
from gpusync.errors import MissingDependencyError
from gpusync.testing import EmulatedRuntime

ON_EVERY_DEVICE = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="session")
def needs_compiler() -> None:
    """Skip where there is no compiler; where CI runs, fail."""
    if shutil.which("g++") is None:
        if os.environ.get("CI"):
            pytest.fail("the emulated device must run in CI, and g++ is not installed")
        pytest.skip("g++ is not installed")


@pytest.fixture(params=ON_EVERY_DEVICE)
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """A device that runs work as it is queued (emulated), or as CUDA does; nothing outside its memory was written."""
    if request.param == "cuda":
        try:
            device = cuda_runtime(torch.device("cuda", 0))
        except MissingDependencyError as err:
            pytest.skip(str(err))
        yield device
        device.synchronize()
        return
    request.getfixturevalue("needs_compiler")
    emulated = EmulatedRuntime()
    yield emulated
    assert emulated.damage == ()
