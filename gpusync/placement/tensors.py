"""The bytes of a torch tensor or numpy array, checked against the checkpoint's entry of that name.

torch is never imported here: a caller who holds a torch tensor has loaded it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusync.errors import ChainError
from gpusync.types import TensorEntry

DTYPE_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
_PACKED = {"F4": ("float4_e2m1fn_x2", "uint8"), "F6_E2M3": ("uint8",), "F6_E3M2": ("uint8",)}
"""dtypes with less than a byte per element: arrays of them count packed bytes, so only the size is compared."""

_BITS_OF = {"BF16": "uint16"} | {name: "uint8" for name in DTYPE_NAMES if name.startswith("F8_")}
"""What numpy has for dtypes it does not know: unsigned words of the same width."""


def tensor_bytes(name: str, tensor: Any, entry: TensorEntry) -> tuple[NDArray[np.uint8], bool]:
    """Return a tensor's bytes in row-major, little-endian order, and whether they are the caller's own memory.

    Parameters
    ----------
    tensor
        A dense torch tensor on any device, or a numpy array. BF16 and F8 may come as unsigned words.
    entry
        What the checkpoint says of the tensor.

    Returns
    -------
    data, borrowed
        ``data`` has shape (nbytes,). Where ``borrowed`` is False it is a copy that belongs to the caller.

    Raises
    ------
    ChainError
        Another dtype, shape or size than the entry's, or nothing that has dense bytes.
    """
    torch = sys.modules.get("torch")
    if isinstance(tensor, np.ndarray):
        data, borrowed = _numpy_bytes(tensor)
        kind = tensor.dtype.name
        kinds = {DTYPE_NAMES.get(entry.dtype), _BITS_OF.get(entry.dtype)}
    elif torch is not None and isinstance(tensor, torch.Tensor):
        data, borrowed = _torch_bytes(torch, name, tensor)
        kind = str(tensor.dtype).removeprefix("torch.")
        kinds = {DTYPE_NAMES.get(entry.dtype)}
    else:
        raise ChainError(
            "neither a torch tensor nor a numpy array", tensor=name, got=type(tensor).__name__
        )
    packed = _PACKED.get(entry.dtype)
    fits = kind in packed if packed else kind in kinds and tuple(tensor.shape) == entry.shape
    if not fits or data.size != entry.nbytes:
        raise ChainError(
            "the tensor is not of the checkpoint's dtype and shape. Publish a full version instead.",
            tensor=name,
            expected=f"{entry.dtype} {list(entry.shape)}",
            got=f"{kind} {list(tensor.shape)}",
        )
    return data, borrowed


def _numpy_bytes(array: NDArray[Any]) -> tuple[NDArray[np.uint8], bool]:
    little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    return little.reshape(-1).view(np.uint8), np.may_share_memory(little, array)


def _torch_bytes(torch: Any, name: str, tensor: Any) -> tuple[NDArray[np.uint8], bool]:
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        raise ChainError(
            "the tensor has no dense bytes",
            tensor=name,
            got=f"{tensor.layout} on {tensor.device.type}",
        )
    plain = tensor.detach()
    borrowed = (
        plain.device.type == "cpu"
        and plain.is_contiguous()
        and not plain.is_conj()
        and not plain.is_neg()
    )
    if not borrowed:
        # One copy that is on the CPU and contiguous at once; .cpu().contiguous() may make two.
        plain = torch.empty(plain.shape, dtype=plain.dtype, device="cpu").copy_(plain)
    return plain.reshape(-1).view(torch.uint8).numpy(), borrowed
