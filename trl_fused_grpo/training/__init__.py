"""
What depends on a `GRPOTrainer`: which log-probabilities to compute, when, and which faster path may be taken. A map of
the folder, in the order in which a training comes through it:

- `checks` refuses options, models and tensors that cannot be trained.
- `state` has what the trainer's overrides call: generation, the plan of micro-batches, a training step, its loss.
- `deferral` leaves log-probs out of the generation; `deferred_ratio` computes their importance ratios in training.
- `merging` has micro-batches share forwards, as `merge_plan` counts their tokens; `partitioning` decides which
  sequences go together. `window` knows where in an accumulation window a training is, `first_forward` what its first
  forward may take more.
- `exchange` moves sequences between processes; `exchange_plan` decides which.
- `loss_request` says which positions a loss needs, with which gradients. `logps_request` has the types in between:
  request, arguments, options, result.
- `engine` chooses the layout and computes log-probs; `agreement` has processes choose alike, `anywhere` heed what the
  user changed on one of them. `trial` tries each layout out at the first batch, on the sequences that `trial_rows`
  takes, in the precision that `trial_precision` finds; `buffers` and `random_states` leave everything else as it was.
  `logps` runs a batch, `sub_batch` a part of it.
- `shared_backward` runs the backward of a shared forward, in parts where memory runs out.
- `memory` has what forwards may take of the device's memory: as much as TRL's, or more for speed.
- `verification` compares micro-batches with TRL's own path (`fused_verify`).
- `summary` says what a training does and why not a faster way, in the lines of `summary_table`.
- `rloo` has what is different for an `RLOOTrainer`: what its loss asks for, its old log-probs.
- `kl` adds another KL estimator than TRL's.
- `eligibility` and `forecastable` have the predicates `why_...`: may a faster path be taken? They ask `customisation`
  (what the user replaced on the trainer), `customised_model` (what on the model) and `noise` (what draws at random).
"""
