"""Compiled loops: they call parts of their file, and their cache may be absent or damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_MODULE = """
import numpy
from gpusync.compiled import compiled, part

@part
def halved(word):
    return word >> numpy.uint64(1)

@part
def doubled_and_halved(word):
    return halved(word << numpy.uint64(1))

@compiled("uint64(uint64[::1])")
def add(words):
    total = words[0] & 0
    for word in words:
        total += doubled_and_halved(word)
    return total
"""
_CALL = "import numpy, loop; print(loop.add(numpy.arange(5, dtype=numpy.uint64)))"
_IS_KEPT = "import loop; from gpusync.compiled import are_kept; print(are_kept('loop'))"


def _run(folder: Path, cache: Path, code: str = _CALL) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join([str(folder), *sys.path])
    env = os.environ | {"PYTHONPATH": places, "NUMBA_CACHE_DIR": str(cache)}
    env |= {"XDG_CACHE_HOME": str(cache), "HOME": str(cache)}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True
    )


def _check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout == "10\n"


def test_machine_code_is_kept_and_used_again(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "loop.py").write_text(_MODULE)
    assert _run(tmp_path, cache, _IS_KEPT).stdout == "False\n"
    _check(_run(tmp_path, cache))
    assert _run(tmp_path, cache, _IS_KEPT).stdout == "True\n"
    kept = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb*")}
    assert len(kept) == 2
    _check(_run(tmp_path, cache))
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb*")} == kept


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_a_damaged_cache_is_passed_over_and_named(tmp_path: Path, suffix: str) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "loop.py").write_text(_MODULE)
    _check(_run(tmp_path, cache))
    for path in cache.rglob(f"*.{suffix}"):
        path.write_bytes(path.read_bytes()[:20])
    done = _run(tmp_path, cache)
    _check(done)
    assert "NUMBA_CACHE_DIR" in done.stderr


def test_without_a_folder_for_it_every_process_compiles(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(_MODULE)
    (tmp_path / "__pycache__").write_bytes(b"")
    (tmp_path / "cache").write_bytes(b"")
    done = _run(tmp_path, tmp_path / "cache" / "below")
    _check(done)
    assert "NUMBA_CACHE_DIR" in done.stderr


def test_a_change_in_a_part_of_another_file_has_the_loop_compiled_anew(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    moved = _MODULE.replace("@part\ndef halved(word):\n    return word >> numpy.uint64(1)\n", "")
    (tmp_path / "loop.py").write_text(f"from halving import halved\n{moved}")
    part = (
        "import numpy\nfrom gpusync.compiled import part\n@part\ndef halved(word): return word {}\n"
    )
    (tmp_path / "halving.py").write_text(part.format(">> numpy.uint64(1)"))
    _check(_run(tmp_path, cache))
    (tmp_path / "halving.py").write_text(part.format("* numpy.uint64(3)"))
    done = _run(tmp_path, cache)
    assert (done.returncode, done.stdout) == (0, "60\n"), done.stderr


def test_a_change_in_a_constant_of_another_file_has_the_loop_compiled_anew(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    moved = _MODULE.replace("word << numpy.uint64(1)", "word << steps.COUNT")
    (tmp_path / "loop.py").write_text(f"import steps\n{moved}")
    for count, total in ((1, 10), (3, 40)):
        (tmp_path / "steps.py").write_text(f"import numpy\nCOUNT = numpy.uint64({count})\n")
        done = _run(tmp_path, cache)
        assert (done.returncode, done.stdout) == (0, f"{total}\n"), done.stderr


def test_what_is_compiled_after_its_files_were_replaced_is_not_taken_for_the_new(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "cache"
    moved = _MODULE.replace("@part\ndef halved(word):\n    return word >> numpy.uint64(1)\n", "")
    (tmp_path / "loop.py").write_text(f"from halving import halved\n{moved}")
    old, new = (
        f"import numpy\nfrom gpusync.compiled import part\n@part\ndef halved(word): return word {rest}\n"
        for rest in (">> numpy.uint64(1)", "* numpy.uint64(3)")
    )
    (tmp_path / "halving.py").write_text(old)
    replaced = f"import loop, numpy; open({str(tmp_path / 'halving.py')!r}, 'w').write({new!r});"
    _check(_run(tmp_path, cache, f"{replaced} {_CALL.partition(';')[2]}"))
    done = _run(tmp_path, cache)
    assert (done.returncode, done.stdout) == (0, "60\n"), done.stderr


def test_machine_code_for_another_processor_is_not_kept_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "loop.py").write_text(_MODULE)
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    _check(_run(tmp_path, cache))
    assert _run(tmp_path, cache, _IS_KEPT).stdout == "True\n"
    monkeypatch.delenv("NUMBA_CPU_NAME")
    assert _run(tmp_path, cache, _IS_KEPT).stdout == "False\n"
