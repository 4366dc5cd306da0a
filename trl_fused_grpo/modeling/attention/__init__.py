"""
The attention of packed rows, and of padded ones.

- `packed` puts it where models look for theirs; `watch` looks at what the model asks of it.
- `varlen` computes it with `kernels`; for models that load as `"eager"` it is `eager`, with `eager_formula` (which
  formula their own function computes), `sinks` and `flex`.
- `masks` has masks of more than causality, one for each packed sequence.
- `padded` keeps padded rows safe from NaN gradients.
"""
