"""`python -m trl_fused_grpo` is the `trl-fused-grpo` command."""

from .cli import app


app(prog_name="trl-fused-grpo")
