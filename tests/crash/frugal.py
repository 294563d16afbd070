"""A pull in a process of its own, watched: ``python -m tests.crash.frugal LOCAL BASE SOURCE TARGET DESCRIPTORS``.

Prints one JSON line: the most descriptors open at any file operation, the peak of anonymous memory over what was there
before the pull, and how the pull ended. DESCRIPTORS is the limit the process gives itself.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections.abc import Callable
from typing import Any

import gpusync
from gpusync import fsio

OPENING = ("open_regular", "create", "open_for_writing", "scratch_file", "list_dir")


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no RssAnon")


class Watch:
    def __init__(self) -> None:
        self.descriptors = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._start_bytes = self.peak_bytes = anonymous_bytes()
        for name in OPENING:
            setattr(fsio, name, self._counted(getattr(fsio, name)))
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def stop(self) -> int:
        """Return the peak of anonymous memory since the start."""
        self._stop.set()
        self._thread.join()
        return self.peak_bytes - self._start_bytes

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            result = real(*arguments)
            with self._lock:  # the listing below has a descriptor of its own
                self.descriptors = max(self.descriptors, len(os.listdir("/proc/self/fd")) - 1)
            return result

        return wrapper


def main() -> None:
    local, base, source, target, descriptors = sys.argv[1:]
    gpusync.pull  # noqa: B018  resolves the name, and with it every import that a pull needs
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors), int(descriptors)))
    watch = Watch()
    try:
        end = gpusync.pull(local, base, source, int(target)).outcome
    except gpusync.GpuSyncError as err:
        end = f"{type(err).__name__}: {err}"
    finally:
        peak = watch.stop()
    print(json.dumps({"end": end, "descriptors": watch.descriptors, "anonymous_bytes": peak}))


if __name__ == "__main__":
    main()
