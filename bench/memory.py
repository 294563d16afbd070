"""Memory: the peak of anonymous memory while a process pulls deltas of a large checkpoint.

Each pull runs in a child of its own, interpreter and imports included; the parent samples RssAnon + RssShmem of
``/proc/PID/status`` every few milliseconds. File-backed pages (the page cache) are not counted: the system takes
them back when it needs them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from common import CheckError, Sizes, check_digests, digests_of_checkpoint, parse_args, workspace
from report import Target, machine_info, publish_result, targets_table
from stream import Stream, make_stream
from tables import table

FULL = Sizes(model_nbytes=2_000_000_000, density=0.01, rounds=1)
SMOKE = Sizes(model_nbytes=6_000_000, density=0.01, rounds=1)
CHAIN = 16
LIMIT_BYTES = 512_000_000
_SAMPLE_SECONDS = 0.003
_CHILD = """
import json, sys
import gpusync
local, base, source, version = sys.argv[1:]
report = gpusync.pull(local, base, source, int(version), durable=False)
print(json.dumps({"versions": len(report.versions), "seed": report.seed, "seconds": report.seconds}))
"""


@dataclass(frozen=True)
class Peak:
    """One pull in a child: what it did, and the most anonymous memory that was seen."""

    what: str
    encoding: str
    folded_versions: int
    seed: str
    seconds: float
    peak_bytes: int
    samples: int


def pull_in_child(what: str, encoding: str, stream: Stream, local: Path, version: int) -> Peak:
    """Pull in a child process and watch it; check the result."""
    source = stream.sources["seekable"]
    command = [
        sys.executable,
        "-c",
        _CHILD,
        str(local),
        str(stream.base_dir),
        str(source),
        str(version),
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = samples = 0
    while child.poll() is None:
        peak = max(peak, anonymous_nbytes(child.pid))
        samples += 1
        time.sleep(_SAMPLE_SECONDS)
    output, _ = child.communicate()
    if child.returncode != 0:
        raise CheckError(f"wrong result: {what}: the child ended with status {child.returncode}")
    check_digests(f"{what}, {encoding}", stream.digests[version], digests_of_checkpoint(local))
    done = json.loads(output.splitlines()[-1])
    return Peak(
        what=what,
        encoding=encoding,
        folded_versions=done["versions"],
        seed=done["seed"],
        seconds=round(done["seconds"], 3),
        peak_bytes=peak,
        samples=samples,
    )


def anonymous_nbytes(pid: int) -> int:
    """Return RssAnon + RssShmem of a process; 0 once it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    kib = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return 1024 * sum(kib)


def measure(root: Path, sizes: Sizes, encoding: str) -> list[Peak]:
    """Pull chains of 16 and of 1 into a new folder and into one that is there."""
    stream = make_stream(
        root,
        model_nbytes=sizes.model_nbytes,
        density=sizes.density,
        versions=CHAIN + 1,
        framings=("seekable",),
        encoding=encoding,
    )
    old, new = root / "old", root / "new"
    return [
        pull_in_child("new folder, 1 version", encoding, stream, old, 1),
        pull_in_child("new folder, 16 versions", encoding, stream, new, CHAIN),
        pull_in_child("local folder, 1 version", encoding, stream, new, CHAIN + 1),
        pull_in_child("local folder, 16 versions", encoding, stream, old, CHAIN + 1),
    ]


def main() -> None:
    args, sizes = parse_args("Peak anonymous memory of a pull.", FULL, SMOKE)
    peaks: list[Peak] = []
    for encoding in ("xor", "xor_sparse"):
        with workspace(args.temp_dir) as root:
            machine = machine_info(root)
            peaks += measure(root, sizes, encoding)
    targets = [
        Target(f"peak MB, {encoding}, {what}", peak / 1e6, LIMIT_BYTES / 1e6)
        for encoding, what, peak in ((p.encoding, p.what, p.peak_bytes) for p in peaks)
    ]
    rows = [
        [
            f"{p.encoding}: {p.what}",
            f"{p.peak_bytes / 1e6:.0f}",
            f"{p.seconds:.2f}",
            p.seed,
            str(p.samples),
        ]
        for p in peaks
    ]
    document = {
        "sizes": vars(sizes),
        "peaks": [asdict(peak) for peak in peaks],
        "limit_bytes": LIMIT_BYTES,
        "targets": [target.to_dict() for target in targets],
    }
    tables = [
        table(["pull", "peak MB", "seconds", "seed", "samples"], rows),
        "## Targets",
        targets_table(targets),
    ]
    publish_result("memory", args, machine, document, tables)


if __name__ == "__main__":
    main()
