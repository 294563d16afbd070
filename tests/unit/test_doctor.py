"""What ``gpusync doctor`` finds out."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

import gpusync
from gpusync.cli.doctor import diagnose, installed_version, look_at_folder, parse_file_system

MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:25 / /proc rw - proc proc rw
41 22 0:40 / /mnt/store rw shared:5 - nfs4 host:/store rw
42 22 0:41 / /mnt/with\\040space rw - xfs /dev/sdb rw
43 41 0:42 / /mnt/store rw - tmpfs tmpfs rw
damaged line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", "ext4"),
        ("/mnt/storefront", "ext4"),
        ("/mnt/store/weights", "tmpfs"),
        ("/mnt/with space/a", "xfs"),
        ("/proc", "proc"),
    ],
)
def test_the_deepest_and_last_mount_decides(path: str, kind: str) -> None:
    assert parse_file_system(MOUNTS, Path(path)) == kind


def test_no_mounts_mean_unknown() -> None:
    assert parse_file_system("", Path("/x")) == "unknown"


def test_installed_version_takes_the_first_that_is_there() -> None:
    assert installed_version(("no-such-distribution-here", "numpy")) is not None
    assert installed_version(("no-such-distribution-here",)) is None


def test_a_folder_is_named_by_its_real_path(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    found = look_at_folder(tmp_path / "link")
    assert found.path == os.path.realpath(real)
    assert found.file_system != "unknown"
    assert found.free_bytes > 0


def test_diagnosis_names_every_package_that_touches_bytes(repository: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"\W", line)[0] for line in project["dependencies"]}
    assert needed - {"rich", "typer"} <= set(diagnose(()).packages)


def test_diagnosis_says_which_device_and_why_not_more(tmp_path: Path) -> None:
    found = diagnose((tmp_path,))
    assert found.gpusync == gpusync.__version__
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    missing = [reason for reason in found.why_not_more if reason.startswith("cuda: ")]
    assert found.device == ("cpu" if missing else "cuda")
    if not torch.cuda.is_available():
        assert found.device == "cpu"
        assert "torch is a CPU build" in missing[0] or "no usable GPU" in missing[0]
    assert found.packages["torch"] is not None
    assert found.settings["swap"] == "auto"
    assert found.cores >= 1


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        diagnose((tmp_path / "absent",))
