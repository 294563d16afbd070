"""A trainer that publishes its steps, and has inference hosts follow over HTTP, as slime and miles do.

    mkdir -p DIR/base
    gpusync serve --base-dir DIR/base --root DIR --port 30010 &              # on every host, beside its engine
    GPUSYNC_SOURCE_DIR=DIR/published python -m sglang.launch_server ... &    # gpusync installed: it updates in place
    python docs/examples/http_trainer.py DIR --receiver http://127.0.0.1:30010 --engine http://127.0.0.1:30000

DIR is storage that trainer and hosts share. Per step and host: ``/pull_weights`` while the engine serves, then a pause
in which ``/update_weights_from_disk`` changes the live weights. An engine without gpusync reloads there instead.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import gpusync

_TIMEOUT_SECONDS = 600


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post JSON and return the reply's; ends the run where the reply is not a success."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            reply: dict[str, Any] = json.loads(response.read() or b"{}")
    except urllib.error.HTTPError as err:
        raise SystemExit(f"{url}: {err.code} {err.read().decode(errors='replace')}") from err
    if reply.get("success") is False:
        raise SystemExit(f"{url}: {reply.get('message')}")
    return reply


@dataclass(frozen=True)
class Host:
    """An inference host: its receiver (``gpusync serve``), its engine where it has one, and its local checkpoint."""

    receiver: str
    engine: str | None
    local: Path

    def pull(self, published: Path, version: int) -> None:
        """Bring the local checkpoint to a version, while the engine serves."""
        where = {"local_checkpoint_dir": str(self.local), "source_dir": str(published)}
        reply = post(f"{self.receiver}/pull_weights", {**where, "target_version": version})
        print(f"{self.receiver}: {reply['message']}")

    def update(self, version: int) -> None:
        """Bring the live weights to the version of the local checkpoint, in a pause."""
        if self.engine is None:
            return
        post(f"{self.engine}/pause_generation", {"mode": "retract"})
        # Not in a finally: an engine whose update ended badly is looked at before it serves again.
        new = {"model_path": str(self.local), "weight_version": str(version)}
        post(f"{self.engine}/update_weights_from_disk", new)
        post(f"{self.engine}/continue_generation", {})


def follow(hosts: list[Host], published: Path, version: int) -> None:
    """Bring all hosts to a version; none is paused before all have pulled."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(lambda host: host.pull(published, version), hosts))
        list(pool.map(lambda host: host.update(version), hosts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path, help="a folder on shared storage, empty but for base")
    parser.add_argument("--receiver", action="append", required=True, help="one for each host")
    parser.add_argument("--engine", action="append", default=[], help="one for each host, or none")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    engines = args.engine or [None] * len(args.receiver)
    hosts = [
        Host(receiver, engine, args.dir.resolve() / f"local-{number}")
        for number, (receiver, engine) in enumerate(zip(args.receiver, engines, strict=True))
    ]
    base, published = args.dir.resolve() / "base", args.dir.resolve() / "published"

    model = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 64)).to(torch.bfloat16)
    base.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), base / "model.safetensors")
    (base / "config.json").write_text('{"model_type": "example"}\n')
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    publisher = gpusync.Publisher(published, base)

    for _ in range(args.steps):
        tokens = torch.randint(64, (8, 16))
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(hosts, published, publisher.publish(model.state_dict().items()))
    trained = args.dir / "trained"
    trained.mkdir()
    save_file(model.state_dict(), trained / "model.safetensors")


if __name__ == "__main__":
    main()
