"""The fused linear function in torch alone: log-probabilities of a linear head, and their gradients."""
