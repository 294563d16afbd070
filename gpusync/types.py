"""Frozen dataclasses that cross layer borders: parsed wire objects, progress, reports."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Encoding = Literal["xor", "overwrite", "xor_sparse", "xor_rows"]
Algorithm = Literal["xxh3-128", "blake3", "adler32"]
Framing = Literal["seekable", "single"]

ENCODINGS: tuple[Encoding, ...] = ("xor", "overwrite", "xor_sparse", "xor_rows")
ALGORITHMS: tuple[Algorithm, ...] = ("xxh3-128", "blake3", "adler32")


@dataclass(frozen=True, slots=True)
class Digest:
    """A tensor's digest: algorithm and lowercase hex."""

    algorithm: Algorithm
    hex: str

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.hex}"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One row of a safetensors header; ``begin`` and ``end`` are bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """A validated safetensors header.

    ``raw`` is the file's first ``data_offset`` bytes (length word and JSON, verbatim), so that a shard with new
    tensor bytes keeps its header. ``entries`` are in order of ``begin``.
    """

    file: str
    file_nbytes: int
    raw: bytes
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]

    @property
    def data_offset(self) -> int:
        """Bytes from the start of the file to the data."""
        return len(self.raw)


@dataclass(frozen=True, slots=True)
class DeltaIndex:
    """A validated index of a delta version."""

    version: int
    base_version: int
    encoding: Encoding
    algorithm: Algorithm
    weight_map: Mapping[str, str]
    manifest_digest: str | None = None


@dataclass(frozen=True, slots=True)
class FullIndex:
    """A validated index of a full checkpoint: tensor name to shard file.

    ``version`` and ``manifest_digest`` are None unless the metadata gives them.
    """

    weight_map: Mapping[str, str]
    version: int | None = None
    manifest_digest: str | None = None


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """What ``gpusync.manifest.json`` says of one tensor: of its blob's bytes, and of the tensor they rebuild."""

    blob_digest: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    framing: Framing


@dataclass(frozen=True, slots=True)
class Manifest:
    """A validated ``gpusync.manifest.json``; ``base_fingerprint`` is None where the base is version 0."""

    version: int
    run_id: str
    base_fingerprint: str | None
    tensors: Mapping[str, ManifestEntry]


@dataclass(frozen=True, slots=True)
class Frame:
    """One zstd frame of a blob. ``content_nbytes`` is None where the frame header does not say."""

    offset: int
    nbytes: int
    content_nbytes: int | None
    window_nbytes: int
    has_checksum: bool
    skippable: bool
    blocks: int


@dataclass(frozen=True, slots=True)
class Progress:
    """One progress event of long work.

    ``stage`` is one of "hook", "open", "lock", "materialize", "verify", "decode", "swap", "publish"; ``done_bytes`` grows to
    ``total_bytes`` (0 where nothing is counted). A callback that raises stops the work at a safe point, and its exception
    reaches the caller.
    """

    stage: str
    done_bytes: int = 0
    total_bytes: int = 0
    message: str = ""


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True)
class StageTimes:
    """Seconds and bytes by stage name. Stages that overlap each count their own seconds."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the seconds on one line, as the log has them: ``open:0.010,swap:0.002``."""
        return ",".join(f"{name}:{seconds:.3f}" for name, seconds in self.seconds.items()) or "none"


@dataclass(frozen=True)
class Report:
    """Base of the reports: ``to_dict`` gives plain JSON values."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PullReport(Report):
    """What a pull did.

    Parameters
    ----------
    outcome
        "applied", "unchanged" (the folder was at the target), "stale" (the target is below the applied version),
        "reset" (target 0).
    from_version
        Version before, None for a fresh folder.
    to_version
        Version the folder stands at now.
    seed
        "local" (patched from the local files), "base", "full" (with ``seed_version``), "aggregate".
    versions
        Delta versions that were folded in.
    swap
        "staged", "rolling", or "none".
    recovered
        What an earlier process had left: "none", "discarded" (before the swap) or "resumed" (in the swap).
    tensors_changed, tensors_copied, tensors_healed
        Tensors with new bytes; copied through unchanged; rebuilt from seed and chain because the local bytes were bad.
    unverified_source
        Versions whose tensors carry no published digest (full versions).
    stages
        Seconds and bytes: hook, open, audit, materialize, spool, sync, swap.
    notes
        Whatever took another path than asked, with the reason.
    """

    outcome: str
    from_version: int | None
    to_version: int
    target_version: int
    seed: str = "local"
    seed_version: int | None = None
    versions: tuple[int, ...] = ()
    swap: str = "none"
    durable: bool = True
    recovered: str = "none"
    tensors_changed: int = 0
    tensors_copied: int = 0
    tensors_healed: tuple[str, ...] = ()
    unverified_source: tuple[int, ...] = ()
    wire_bytes: int = 0
    written_bytes: int = 0
    seconds: float = 0.0
    stages: StageTimes = field(default_factory=StageTimes)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttachReport(Report):
    """Where the checkpoint's tensors live in a model.

    Parameters
    ----------
    placed, relaid
        Tensor to the live tensors that hold it: as it is, or rearranged by the engine together with its module's others.
    dropped, refused
        Tensor to the reason why it is not in this model, or cannot be updated in place.
    unmanaged
        Parameters and buffers that no checkpoint tensor feeds; updates leave them alone.
    placed_bytes, relaid_bytes
        Live bytes, those that tensors share counted once.
    dropped_bytes, refused_bytes
        Bytes in the checkpoint.
    """

    version: int
    placed: Mapping[str, tuple[str, ...]]
    placed_bytes: int
    dropped: Mapping[str, str] = field(default_factory=dict)
    relaid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    unmanaged: tuple[str, ...] = ()
    proof: str = "bytes"
    seconds: float = 0.0
    dropped_bytes: int = 0
    relaid_bytes: int = 0
    refused_bytes: int = 0

    def __str__(self) -> str:
        """Return the report for people: a line per kind, and each reason once with the tensors that it is about."""
        lines = [
            f"attached at version {self.version}, proven by {self.proof}, {self.seconds:.1f} s"
        ]
        for kind, names, nbytes, where in (
            ("placed", self.placed, self.placed_bytes, "live"),
            ("relaid", self.relaid, self.relaid_bytes, "live"),
            ("dropped", self.dropped, self.dropped_bytes, "in the checkpoint"),
            ("refused", self.refused, self.refused_bytes, "in the checkpoint"),
        ):
            lines.append(f"  {kind:<9} {len(names):>6} tensors {nbytes:>15,} bytes {where}")
            if kind in ("dropped", "refused"):
                lines += _reasons(self.dropped if kind == "dropped" else self.refused)
        lines.append(f"  unmanaged {len(self.unmanaged):>6} parameters and buffers")
        return "\n".join(lines)


def _reasons(reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each reason, with how many tensors it is about and the first of them."""
    names_of: dict[str, list[str]] = {}
    for name, reason in sorted(reasons.items()):
        names_of.setdefault(re.sub(r"\d+", "#", reason), []).append(name)
    return [
        f"    {len(names)} ({names[0]}{', ...' if len(names) > 1 else ''}): {reasons[names[0]]}"
        for names in names_of.values()
    ]


@dataclass(frozen=True)
class UpdateReport(Report):
    """What an update of a live model did.

    Parameters
    ----------
    outcome
        "applied", "unchanged", "stale" or "reset", as in PullReport.
    from_version, to_version
        The live model's version before and now.
    disk_version
        Version of the local checkpoint now, None without one.
    device
        "cpu", "cuda" or "emulated": where the digests and the commit ran.
    pause_seconds
        Duration of ``commit``; prepare and finish run while the model serves.
    change_list_bytes
        Host memory that the change lists took.
    tensors_by_path
        Path name to number of tensors; ``reasons`` says why a tensor took another path than the device's own.
    write_back
        "sync", "background" or "none", and ``pull`` the folder's own report where it has one.
    """

    outcome: str
    from_version: int
    to_version: int
    target_version: int
    disk_version: int | None = None
    device: str = "cpu"
    write_back: str = "none"
    versions: tuple[int, ...] = ()
    tensors_changed: int = 0
    changed_bytes: int = 0
    change_list_bytes: int = 0
    wire_bytes: int = 0
    tensors_by_path: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    unverified_source: tuple[int, ...] = ()
    prepare_seconds: float = 0.0
    pause_seconds: float = 0.0
    finish_seconds: float = 0.0
    stages: StageTimes = field(default_factory=StageTimes)
    pull: PullReport | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BadTensor:
    """A local tensor whose bytes are not what its digest says."""

    file: str
    tensor: str
    expected: str
    got: str


@dataclass(frozen=True)
class VerifyReport(Report):
    """What a scrub of a local checkpoint found.

    ``ok`` is True when nothing bad is left. ``evidence`` says what the bytes were compared with: "table" (digests
    taken when gpusync wrote them), "published" (digests and base bytes still found at the source) or "none".
    ``unproven`` counts tensors that nothing speaks for; they are not bad, and not shown to be good.
    """

    ok: bool
    version: int | None
    tensors: int
    nbytes: int
    evidence: str
    bad: tuple[BadTensor, ...] = ()
    repaired: tuple[str, ...] = ()
    unproven: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
