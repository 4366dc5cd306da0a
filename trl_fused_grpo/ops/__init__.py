"""
Log-probabilities and entropies of a linear head, linear layers with LoRA, and their gradients. Needs torch and nothing
else. A map of the folder:

- `lm_head` has the head as plain tensors, an `LMHead`.
- `linear_logps` has the public function, `fused_linear_logps`, and its autograd function; `forecast` the protocol of
  what it is told about gradients.
- `chunk_size` says how much memory logits may take, `row_blocks` which rows' logits exist together.
- `block_forward` runs a block of rows.
- `chunked_linear` has the GEMMs over chunks of rows; `kernels/` reads and overwrites a chunk of logits.
- `layer_functions` are norms, gated activations and rotary embeddings, with a kernel each (`kernels/layers`), which
  `kernels/launching` launches; and the cast that several projections share.
- `lora_product` is a linear layer with LoRA's low-rank terms.
- `precomputed_grads` compares in backward what forward assumed; `recompute` computes logits a second time.
"""
