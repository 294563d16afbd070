"""What the first update on a device would otherwise do first: build the kernels, load nvCOMP and try it."""

from __future__ import annotations

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
    runtime.enter_thread()
    stream = runtime.stream()
    stream.launch("gs_fill_guards", 1, (0, 0))  # no zones: it is built, and does nothing
    stream.synchronize()
    return nvcomp_is_trusted(runtime, Nvcomp(runtime.nvcomp_library()))
