"""What the first update on a device would otherwise do first: build the kernels, load nvCOMP and try it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from gpusync.device.launches import load_commit_kernels
from gpusync.device.nvcomp import Nvcomp
from gpusync.device.runtime import Runtime
from gpusync.device.selftest import nvcomp_is_trusted


def warm_up(runtime: Runtime) -> str | None:
    """Build the kernels and try the decoder; both are kept for the life of the process, the kernels on disk as well.

    Returns
    -------
    str or None
        Why host threads will decode in nvCOMP's place; None where it decodes correctly.

    Raises
    ------
    MissingDependencyError, KernelError
        What the device path needs is not here, or does not build.
    """
    with ThreadPoolExecutor(1, "gpusync-warmup") as pool:  # the caller's thread stays as it is
        return pool.submit(_warm_up, runtime).result()


def _warm_up(runtime: Runtime) -> str | None:
    runtime.enter_thread()
    stream = runtime.stream()
    load_commit_kernels(stream)
    stream.synchronize()
    return nvcomp_is_trusted(runtime, Nvcomp(runtime.nvcomp_library()))
