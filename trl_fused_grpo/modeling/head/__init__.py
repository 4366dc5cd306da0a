"""
From hidden states to log-probabilities.

- `fused_forward` has the forward that returns log-probabilities in place of logits.
- `output_projection` finds a model's head and reads it as an `LMHead`, and has what that head gets; `moe` computes the
  auxiliary loss of experts.
"""
