"""
The GRPO objective, the forecast of its gradients, and a loss for training loops without a trainer. A map of the folder:

- `batch` has the tensors of a micro-batch, `objective` the options and the formula of each token's loss.
- `reduction` weights the tokens and sums them up; `metrics` describes the result.
- `forecast` says which gradient each token will receive.
- `importance_sampling` computes vLLM's ratios from the training forward.
- `liger_loss` puts these together as `FusedLinearGRPOLoss`; `selected_logps` computes its log-probabilities.
"""
