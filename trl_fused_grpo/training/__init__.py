"""
What depends on a `GRPOTrainer`: which log-probabilities to compute, when, and how much of a step may be done otherwise
than stock does it. A map of the folder, in the order in which a training comes through it:

- `checks` refuses options, models and tensors that cannot be trained, and compares a micro-batch with TRL's own path.
- `findings` gathers what is not the libraries' own code, and has the ladder of four levels.
- `state` has what the trainer's overrides call: generation, the plan of its micro-batches, a training step, its loss.
- `old_logps` leaves log-probs out of the generation, and computes in training what follows from them.
- `plan` is made once for a generation batch: which micro-batches share a forward. It has what options and library code
  decide at the level `window`.
- `forward` runs what is planned, and knows where in an accumulation window a training is.
- `requests` says what is asked of a log-prob computation: which positions a loss needs, with which gradients. It adds
  another KL estimator than TRL's.
- `engine` chooses the layout and computes the log-probs of a batch.
- `memory` has what forwards may take of the device's memory: as much as TRL's, or more for speed.
- `summary` says what a training does and why not more.
"""
