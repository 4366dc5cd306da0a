"""
Log-probabilities and entropies of a linear head, and their gradients. Needs torch and nothing else. A map of the
folder:

- `lm_head` has the head as plain tensors, an `LMHead`.
- `linear_logps` has the public function, `fused_linear_logps`, and its autograd function; `forecast` the protocol of
  what it is told about gradients.
- `chunk_size` says how much memory logits may take, `row_blocks` which rows' logits exist together.
- `block_forward` runs a block of rows.
- `chunked_linear` has the GEMMs over chunks of rows; `kernels/` reads and overwrites a chunk of logits.
- `precomputed_grads` compares in backward what forward assumed; `recompute` computes logits a second time.
"""
