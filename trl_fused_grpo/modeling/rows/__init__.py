"""
Rows without padding.

- `layout` makes packed rows of a padded batch, and of a trie of TRL's asynchronous trainer; `multimodal` has what
  belongs to images.
- `layout_choice` says which models allow them.
"""
