"""An engine that has the checkpoint mapped: ``python -m tests.crash.reader FOLDER``.

Maps every file it ever sees in the folder, keeps the maps, and reads them all again and again until its standard input
ends. A map whose bytes change, or that ends early (SIGBUS), kills it. Prints how many files it mapped and read.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import selectors
import sys
from pathlib import Path


class Reader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[tuple[str, int, int], tuple[mmap.mmap, bytes]] = {}
        self.reads = 0

    @property
    def mapped(self) -> int:
        return len(self._maps)

    def look(self) -> None:
        for path in self._folder.iterdir():
            try:
                with open(path, "rb") as file:
                    info = os.fstat(file.fileno())
                    key = (path.name, info.st_ino, info.st_mtime_ns)
                    if key in self._maps or not info.st_size:
                        continue
                    data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            except (IsADirectoryError, FileNotFoundError):
                continue
            self._maps[key] = data, hashlib.sha256(data).digest()

    def read_all(self) -> None:
        for (name, *_), (data, digest) in self._maps.items():
            self.reads += 1
            if hashlib.sha256(data).digest() != digest:
                sys.exit(f"{name} changed under its map")


def main() -> None:
    reader = Reader(Path(sys.argv[1]))
    reader.look()
    print("mapped", flush=True)
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while not selector.select(0):
            reader.look()
            reader.read_all()
    reader.read_all()
    print(json.dumps({"mapped": reader.mapped, "reads": reader.reads}))


if __name__ == "__main__":
    main()
