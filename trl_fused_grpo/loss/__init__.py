"""The GRPO objective: batches, terms, reductions, forecasts of gradients, and the loss for loops of one's own."""
