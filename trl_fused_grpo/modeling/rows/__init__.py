"""
Rows without padding.

- `layout` makes packed rows of a padded batch; `multimodal` has what belongs to images.
- `layout_choice` says which models allow them.
"""
