"""
Hugging Face models: their head, the layout of their rows, their attention, and `model(..., fused=request)`. A map of
the folder:

- `fused_forward` has the forward that returns log-probabilities in place of logits.
- `output_projection` finds a model's head and reads it as an `LMHead`; `moe` computes its auxiliary loss.
- `layout` makes packed and aligned rows; `layout_choice` says which of them a model allows.
- `packed_attention` registers the attention for packed rows with transformers, `varlen_attention` computes it, and
  `attention_watch` looks at what the model asks of it.
- `checkpointing` is gradient checkpointing with less bookkeeping.
"""
