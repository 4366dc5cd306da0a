"""The GRPO objective, the forecast of its gradients, and a loss for training loops without a trainer."""
