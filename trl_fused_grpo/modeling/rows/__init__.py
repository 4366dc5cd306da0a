"""
Rows without padding.

- `layout` makes packed rows of a padded batch; `multimodal` has what belongs to images, `tries` the rows
  of TRL's asynchronous trainer.
- `layout_choice` says which models allow them.
"""
