"""What vLLM's CPU build needs so that TRL can write weights into an engine that is colocated."""

from collections.abc import Callable
from typing import Any


def keep_linear_weights(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """
    Let linear layers keep their weights. On processors with AVX512 vLLM packs them for oneDNN, on those with AMX for a
    kernel of its own, and drops them: TRL's next update, stock's too, then finds nothing to write into.

    Args:
        set_attribute (`Callable`): replaces an attribute of a module, for example for the time of a test.
    """
    import vllm._custom_ops
    from vllm.model_executor.layers import utils

    set_attribute(vllm._custom_ops, "_supports_onednn", False)
    if hasattr(utils, "check_cpu_sgl_kernel"):
        set_attribute(utils, "check_cpu_sgl_kernel", lambda *_: False)
