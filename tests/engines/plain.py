"""vLLM on the CPU with its linear layers as they are on a GPU: read from the parameters, not from packed copies.

Imported in every process that loads a model, before it does.
"""

from __future__ import annotations

from vllm import _custom_ops
from vllm.model_executor.layers import utils

from gpusync.engines.vllm import WorkerExtension, register

_custom_ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda *shape_and_dtype: False

register()
register()  # plugins may be loaded twice in a process


class PlainExtension(WorkerExtension):
    """The extension as it is; naming it loads this module in vLLM's workers."""
