"""The hidden states that a model's head gets, for training loops without a trainer."""

from typing import Any

from torch import Tensor, nn

from trl_fused_grpo._compat import models as model_compat


def read_hidden_states(model: nn.Module, **inputs: Any) -> Tensor:
    """
    Hidden states `[B, L, H]` as a causal language model's head gets them, each of which predicts the token after it.

    The model runs as it is called, in its wrappers, so that DDP reduces the gradients of what is computed from them,
    and autocast, hooks, adapters and vision towers do what they do. Its head runs for one position of each row.

    ```python
    import torch
    from transformers import AutoModelForCausalLM
    from trl_fused_grpo import fused_linear_logps, read_hidden_states, read_lm_head

    causal_lm, ids = AutoModelForCausalLM.from_pretrained(model), torch.tensor([5, 6, 7])
    hidden = read_hidden_states(causal_lm, input_ids=ids[None])
    logps, entropies = fused_linear_logps(hidden[0, :-1], read_lm_head(causal_lm), ids[1:])
    ```

    Args:
        model (`nn.Module`): bare, or in wrappers of PEFT, DDP or DeepSpeed.
        inputs: keyword arguments of its forward, such as `input_ids`, `attention_mask` and `pixel_values`.

    Raises:
        `ValueError`: when the model does not call its head, as a compiled one.
    """
    hidden: list[Tensor] = []

    def keep(head: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        hidden.append(args[0])
        return args[0][:, :1]

    with model_compat.causal_lm_of(model).get_output_embeddings().register_forward_pre_hook(keep):
        model(**{"use_cache": False, **inputs})
    if not hidden:
        raise ValueError(f"{type(model).__name__} did not call its output projection, as a compiled model does not.")
    return hidden[0]
