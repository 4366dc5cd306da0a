"""Every fact about a version of TRL, transformers, PEFT or accelerate, and every private name of theirs."""
