"""
Hugging Face models: `model(..., fused=request)`. Four rooms, each of which imports those above it alone:

- `attention/` keeps the sequences of a packed row apart, and padded rows safe.
- `layers/` runs decoder layers: compiled, or on rows of their own.
- `rows/` makes packed rows of a padded batch, and says which models allow them.
- `head/` returns log-probabilities in place of logits.
"""
