"""
Decoder layers.

- `compiled` runs them compiled as a whole (`fused_compile`).
- `unpacked` runs layers that carry a state, and some attention, on rows of their own (`sequence_rows`).
- `forward_override` puts another forward into a module and takes it out again.
- `memo` keeps what was found out about a model as long as its layers are the same.
"""
