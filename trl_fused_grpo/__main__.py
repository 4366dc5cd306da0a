from .cli import app


app(prog_name="trl-fused-grpo")
