"""The kernels' tests once more with AddressSanitizer in the kernels: they touch no byte that they were not given.

That a planted overrun is found is shown in test_emulator.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpusync.errors import MissingDependencyError
from gpusync.testing import sanitizer_environment

# Left out: random sizes where every size is tried already, and 4 GiB, which make the same accesses again.
CHOSEN = {
    "test_guard_kernels.py": "",
    "test_layer_kernels.py": "",
    "test_list_kernels.py": "",
    "test_row_kernels.py": "",
    "test_xxh3_kernels.py": "not random_lengths and not 4_gib and not (every_length and None)",
}

CHILD = """
import sys
import pytest
from gpusync.testing import sanitizer_flags
if not sanitizer_flags():
    sys.exit("AddressSanitizer's runtime is not in this process")
sys.exit(pytest.main(sys.argv[1:]))
"""

REPORT = re.compile(r"^.*(?:ERROR: AddressSanitizer|runtime error:)", re.MULTILINE)


def test_every_file_of_kernel_tests_is_run() -> None:
    assert {path.name for path in Path(__file__).parent.glob("test_*_kernels.py")} == set(CHOSEN)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", CHOSEN)
def test_kernels_touch_no_byte_outside(repository: Path, file: str) -> None:
    try:
        sanitizer = sanitizer_environment()
    except MissingDependencyError as err:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(err))
    # What the sanitizer writes as it ends the process must not be held in a buffer, nor in pytest's capture.
    options = ["-v", "-x", "--capture=sys", "-p", "no:cacheprovider", "-m", "not gpu"]
    done = subprocess.run(
        [sys.executable, "-u", "-c", CHILD, *options, "-k", CHOSEN[file], f"tests/device/{file}"],
        cwd=repository,
        # Arrays and the device's memory come from malloc anyway; Python's small objects are slow there.
        env={**os.environ, **sanitizer, "PYTHONMALLOC": "pymalloc"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    if done.returncode:
        pytest.fail(failure(file, done.stdout, done.stderr), pytrace=False)


def failure(file: str, stdout: str, stderr: str) -> str:
    """Return what went wrong: the sanitizer's report and the test it ended, else the child's own words."""
    report = REPORT.search(stderr)
    if report is None:
        return f"{file} fails in a process with AddressSanitizer:\n{stdout}\n{stderr}"
    running = stdout.rstrip().rpartition("\n")[2]
    return f"a kernel touches memory it was not given, in {running}\n{stderr[report.start() :]}"
