"""
From hidden states to log-probabilities.

- `fused_forward` has the forward that returns log-probabilities in place of logits.
- `output_projection` finds a model's head and reads it as an `LMHead`; `moe` computes the auxiliary loss of experts.
- `hidden_states` has what that head gets, of any model that is called.
"""
