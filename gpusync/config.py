"""Settings: the only reader of ``os.environ`` for gpusync's own variables.

Arguments beat the environment; the environment beats the defaults below. Every field can be set as
``GPUSYNC_<FIELD IN CAPITALS>``; README's table lists them and a test keeps the two equal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

_MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Caps, timeouts and defaults, read once per operation.

    Parameters
    ----------
    threads
        Host threads that fold tensors; 0 means one per usable core, at most 8.
    piece_bytes
        Bytes of a tensor worked on at a time per thread. Smaller pieces stay in an L2 cache, and cost more in turns that the
        threads take at the interpreter than they save: 2 MiB were the fastest on two cores.
    max_open_files
        Published shards held open at once.
    max_index_bytes, max_header_bytes
        Largest index and safetensors header that are read at all.
    change_list_bytes
        Cap on the change lists of one prepared update in host memory.
    scratch_bytes
        Cap on the scratch memory of a CUDA device while an update is prepared; 0 means the smaller of 1 GiB and a quarter
        of what is free.
    relayout_bytes
        Cap on the host memory in which the new tensors of one relaid module are made.
    device_list_bytes
        Cap on the change lists in the memory of a CUDA device, beyond which they go to pinned host memory; 0 means a
        quarter of what is free.
    ring_bytes
        Pinned host memory that published bytes are read into.
    source_retries
        How often a read that failed with EIO, ESTALE or ETIMEDOUT is tried again on a fresh descriptor.
    hook_timeout_seconds
        How long a pre-read hook may take.
    vote_timeout_seconds
        How long a rank waits for the others of its group, in each stage of an update.
    exchange_bytes
        Host memory that a rank exchanges digests' sums with the others of its group through.
    swap
        "auto": stage a second copy where there is room, else roll shard by shard; "staged" or "rolling" force one.
    reserve_bytes
        Free space that staging leaves on the local disk.
    source_dir
        Folder of published versions that an engine follows, for updates that name its local checkpoint only.
    """

    threads: int = 0
    piece_bytes: int = 2 * _MIB
    max_open_files: int = 64
    max_index_bytes: int = 256 * _MIB
    max_header_bytes: int = 100_000_000
    change_list_bytes: int = 2048 * _MIB
    scratch_bytes: int = 0
    relayout_bytes: int = 8192 * _MIB
    device_list_bytes: int = 0
    ring_bytes: int = 32 * _MIB
    source_retries: int = 2
    hook_timeout_seconds: float = 600.0
    vote_timeout_seconds: float = 600.0
    exchange_bytes: int = 64 * _MIB
    swap: str = "auto"
    reserve_bytes: int = 64 * _MIB
    source_dir: str = ""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Return the settings of this process.

        Raises
        ------
        ValueError
            A variable does not parse as its field's type, or is out of range.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, int | float | str] = {}
        for field in fields(cls):
            name = f"GPUSYNC_{field.name.upper()}"
            if name not in environ:
                continue
            kind = {"int": int, "float": float, "str": str}[str(field.type)]
            try:
                values[field.name] = kind(environ[name])
            except ValueError as err:
                raise ValueError(f"{name}={environ[name]!r} is not a number") from err
        return cls(**values)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.swap not in ("auto", "staged", "rolling"):
            raise ValueError(f"GPUSYNC_SWAP is {self.swap!r}, not auto, staged or rolling")
        if self.piece_bytes < 4096 or self.piece_bytes % 4096:
            raise ValueError(f"GPUSYNC_PIECE_BYTES is {self.piece_bytes}, not a multiple of 4096")
        for name in (
            "threads",
            "source_retries",
            "reserve_bytes",
            "scratch_bytes",
            "device_list_bytes",
            "exchange_bytes",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"GPUSYNC_{name.upper()} is negative")

    @property
    def workers(self) -> int:
        """Threads to use: ``threads``, or one per usable core, at most 8."""
        return self.threads or min(8, len(os.sched_getaffinity(0)))
