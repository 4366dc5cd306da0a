"""Log-probabilities and entropies of a linear head, and their gradients. Needs torch and nothing else."""
