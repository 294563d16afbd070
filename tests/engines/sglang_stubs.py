"""SGLang without a GPU: packages of kernels are stood in for at import, everything of SGLang itself is real.

To be installed before SGLang is imported, in a process of its own: what is stood in for stays.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# fmt: off
_PACKAGES = frozenset((
    "IPython", "av", "blobfile", "cuda", "cutlass", "datasets", "decord", "deep_ep", "deep_gemm",
    "flash_attn", "flashinfer", "gguf", "grpc", "grpc_health", "grpc_reflection", "hf_transfer",
    "interegular", "kernels", "modelscope", "mooncake", "orjson", "outlines", "pynvml", "quack",
    "sgl_kernel", "smg_grpc_proto", "soundfile", "tilelang", "timm", "torch_memory_saver",
    "torchao", "torchaudio", "torchcodec", "torchvision", "uvloop",
))
# fmt: on
"""Kernels, media, servers: what SGLang imports and a load of weights never calls."""

_EARLY = ("AutoConfig", "AutoProcessor", "AutoTokenizer", "GenerationConfig", "LlamaForCausalLM")

_VERSION = "99.0"


class _Anything(type):
    """A class with any attribute: a class again. An instance can be called, and gives a function back as it is."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


def _stand_in(name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    body = {"__init__": lambda self, *args, **kwargs: None, "__call__": call}
    return _Anything(name, (), body)


class _Module(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__version__ = _VERSION
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stand_in(name)
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    """Finds packages that are not installed."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def _leave_only(modules: dict[str, ModuleType], package: str, submodule: str) -> None:
    """Stand in for a package of which nothing but one submodule is there, whatever is installed."""
    modules[package] = ModuleType(package)
    modules[package].__path__ = []
    modules[f"{package}.{submodule}"] = _Module(f"{package}.{submodule}")


def install() -> None:
    """Let SGLang be imported here. vLLM, of which it takes what is installed, has nothing but a rotary embedding that nobody calls."""
    import transformers

    for name in _EARLY:  # loaded on first use, with a look at what is installed
        getattr(transformers, name)
    absent = frozenset(name for name in _PACKAGES if importlib.util.find_spec(name) is None)
    sys.meta_path.insert(0, _Finder(absent))
    _leave_only(sys.modules, "vllm", "_custom_ops")
    real = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return real(name)
        except importlib.metadata.PackageNotFoundError:
            if name.replace("-", "_").startswith(tuple(absent)) or name.startswith("sglang"):
                return _VERSION
            raise

    importlib.metadata.version = version
