"""A device without a GPU: everything the CUDA path does, on host memory, for tests of gpusync and of integrations.

The kernels are the same sources, built by g++ at first use; nvCOMP is a stand-in over libzstd. Needed: g++, libzstd.
"""

from __future__ import annotations

from gpusync.testing.compiling import (
    build,
    build_kernels,
    build_nvcomp_stand_in,
    sanitizer_environment,
    sanitizer_flags,
)
from gpusync.testing.emulated import EmulatedRuntime, emulated_runtime
from gpusync.testing.ledger import Kind
from gpusync.testing.queues import EmulatedEvent, Order
from gpusync.testing.streams import EmulatedStream

__all__ = [
    "EmulatedEvent",
    "EmulatedRuntime",
    "EmulatedStream",
    "Kind",
    "Order",
    "build",
    "build_kernels",
    "build_nvcomp_stand_in",
    "emulated_runtime",
    "sanitizer_environment",
    "sanitizer_flags",
]
