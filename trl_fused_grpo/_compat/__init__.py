"""
Every fact about a version of TRL, transformers, PEFT or accelerate, and the private names of theirs that this package
builds upon.

`required` checks these names at import. `restated` knows the source of what of TRL's is restated in this package,
`tried_architectures` the models whose rows may lose TRL's padding. `trl`, `trl_images` and `trl_cli` have what depends
on TRL or accelerate, `trainers` the trainers of TRL that have a fused subclass, `models` what depends on transformers
or PEFT, `peft` what PEFT's LoRA layer computes and which adapters are on, `architecture` what a model of transformers
is made of, `torch` private names of torch. `libraries` tells whose code something is, `repeated_hooks` takes away hooks
that transformers adds again. `dataclass_fields` adds a field to a class of TRL's options.
"""
