"""
Every fact about a version of TRL, transformers, PEFT or accelerate, and the private names of theirs that this package
builds upon.

`required` checks these names at import. `restated` knows the source of what of TRL's is restated in this package,
`tried_architectures` the models whose rows may lose TRL's padding. `trl`, `trl_images` and `trl_cli` have what depends
on TRL or accelerate, `trainers` the trainers of TRL that have a fused subclass, `models` what depends on transformers
or PEFT, `peft` what PEFT's LoRA layer computes and which adapters are on, `architecture` what a model of transformers
is made of, `torch` private names of torch. `libraries` tells whose code something is. `dataclass_fields` adds a field
to a class of TRL's options.
"""

from importlib.metadata import version

from packaging.version import Version


OLDEST_TRL, NEWEST_TRL = Version("0.27.2"), Version("1.16.0")
SUPPORTED_TRL = f"trl>={OLDEST_TRL},<={NEWEST_TRL}"

# Before anything is imported from a TRL that is too old: that would fail with less to say
_found = Version(version("trl"))
if Version(_found.base_version) < OLDEST_TRL:
    raise ImportError(f"trl_fused_grpo cannot extend TRL {_found}; install {SUPPORTED_TRL}.")
