"""`python -m trl_fused_grpo` is the `trl-fused-grpo` command."""

from .cli import main


if __name__ == "__main__":  # not in processes that a script of `run` starts
    main()
