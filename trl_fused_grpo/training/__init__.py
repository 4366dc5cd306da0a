"""What depends on a `GRPOTrainer`: which log-probabilities to compute, when, and which faster path may be taken."""
