"""
Hugging Face models: their head, the layout of their rows, their attention, and `model(..., fused=request)`. A map of
the folder:

- `fused_forward` has the forward that returns log-probabilities in place of logits; `forward_override` puts it, and
  others, into modules and takes it out again.
- `output_projection` finds a model's head and reads it as an `LMHead`; `moe` computes its auxiliary loss.
- `hidden_states` has what that head gets, of any model that is called.
- `layout` makes packed rows; `layout_choice` says which models allow them. `multimodal` has what belongs to images.
  `layer_memo` keeps what was found out about a model as long as its layers are the same.
- `packed_attention` puts the attention for packed rows where models look for theirs (`attention_places`), and
  `attention_watch` looks at what the model asks of it.
- `varlen_attention` computes it with `attention_kernels`; for models that load as `"eager"` it is `eager_attention`,
  with `eager_formula` (which formula their own function computes), `sink_attention` and `flex_kernel`.
- `sequence_masks` has masks of more than causality, one for each packed sequence; `padded_attention` keeps padded rows
  safe from NaN gradients.
- `unpacked_layers` runs layers that carry a state, and some attention, on rows of their own (`sequence_rows`).
- `compiled_layers` runs decoder layers compiled as a whole (`fused_compile`).
"""
