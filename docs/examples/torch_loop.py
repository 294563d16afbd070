"""A trainer and a serving host in plain PyTorch: every step is published, and taken over live.

    python docs/examples/torch_loop.py DIR [--steps 5]

Both sides are in one process here; all that they share is the folder DIR/published. The host keeps generating (here: a
forward pass) until the moment of ``commit``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gpusync


def make_model() -> nn.Module:
    """Return the model that both sides run; its parameters are named as the checkpoint's tensors."""
    return nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))


class Trainer:
    """Trains, and publishes the weights of every step."""

    def __init__(self, base: Path, published: Path) -> None:
        torch.manual_seed(0)
        self.model = make_model().to(torch.bfloat16)
        base.mkdir(parents=True)
        save_file(dict(self.model.state_dict()), base / "model.safetensors")
        (base / "config.json").write_text('{"model_type": "example"}\n')
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._publisher = gpusync.Publisher(published, base)

    def step(self) -> int:
        """Take one step and publish it; return its version."""
        tokens = torch.randint(64, (8, 16))
        logits = self.model(tokens).float()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return self._publisher.publish(self.model.state_dict().items())


class Host:
    """Serves: a model in memory, and the checkpoint that it would restart from."""

    def __init__(self, base: Path, published: Path, local: Path) -> None:
        self._base, self._published, self._local = base, published, local
        gpusync.pull(local, base, published, 0)
        self.model = make_model().to(torch.bfloat16).requires_grad_(False)
        self.model.load_state_dict(self._read_checkpoint())

    def follow(self, version: int) -> gpusync.UpdateReport:
        """Bring the live model, and then the local checkpoint, to a version."""
        with (
            gpusync.open_chain(
                self._published, version, checkpoint=self._local, base_dir=self._base
            ) as chain,
            gpusync.prepare(self.model, chain) as update,  # an error discards it: nothing happened
        ):
            self.model(torch.arange(64))  # requests go on meanwhile
            update.commit()  # the pause: no forward pass runs here
            return update.finish()

    def restart(self) -> nn.Module:
        """Return what a restarted process would serve."""
        model = make_model().to(torch.bfloat16)
        model.load_state_dict(self._read_checkpoint())
        return model

    def _read_checkpoint(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor
            for path in sorted(self._local.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path, help="an empty folder")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    base, published, local = (args.dir / name for name in ("base", "published", "local"))

    trainer = Trainer(base, published)
    host = Host(base, published, local)
    for _ in range(args.steps):
        version = trainer.step()
        report = host.follow(version)
        print(
            f"version {version}: {report.tensors_changed} tensors changed, "
            f"{1000 * report.pause_seconds:.1f} ms pause"
        )
        for served in (host.model, host.restart()):
            for name, tensor in trainer.model.state_dict().items():
                if not torch.equal(tensor, served.state_dict()[name]):
                    raise SystemExit(f"{name} differs at version {version}")
    print(f"trainer, live model and restarted host agree at version {version}")


if __name__ == "__main__":
    main()
