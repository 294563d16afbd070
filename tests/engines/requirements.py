"""Print what an engine needs, for pip: its own requirements but for torch and its companions, and the extras."""

from __future__ import annotations

import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

_LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec")
"""torch is there at the pinned version; its companions serve sound and pictures, and ask for another torch."""


def main() -> None:
    for engine in sys.argv[1:]:
        for text in requires(engine) or ():
            requirement = Requirement(text)
            marker = requirement.marker
            wanted = marker is None or marker.evaluate({"extra": ""})
            if wanted and requirement.name not in _LEFT_OUT:
                requirement.marker = None
                print(requirement)


if __name__ == "__main__":
    main()
