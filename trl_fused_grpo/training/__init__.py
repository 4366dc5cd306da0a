"""
What depends on a `GRPOTrainer`: which log-probabilities to compute, when, and how much of a step may be done otherwise
than stock does it. A map of the folder, in the order in which a training comes through it:

- `checks` refuses options, models and tensors that cannot be trained.
- `findings` gathers what is not the libraries' own code, and has the ladder of four levels; `overrides` finds whose
  methods a trainer runs. `plan` has what options and library code decide at the level `window`; `randomness` finds
  library modules that draw random numbers, and keeps the states of the generators.
- `state` has what the trainer's overrides call: generation, the plan of micro-batches, a training step, its loss.
- `deferral` leaves log-probs out of the generation; `deferred_ratio` computes their importance ratios in training.
- `merging` has micro-batches share forwards; `partitioning` decides which of them, and which sequences go together.
  `window` knows where in an accumulation window a training is.
- `agreement` has processes choose alike.
- `loss_request` says which positions a loss needs, with which gradients. `logps_request` has the types in between:
  request, arguments, options, result.
- `engine` chooses the layout and computes log-probs; `logps` runs a batch.
- `memory` has what forwards may take of the device's memory: as much as TRL's, or more for speed.
- `check` compares a micro-batch with TRL's own path.
- `summary` says what a training does and why not more.
- `rloo` has what is different for an `RLOOTrainer`; `kl` adds another KL estimator than TRL's.
"""
