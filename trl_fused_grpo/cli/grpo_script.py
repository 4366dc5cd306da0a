"""What each process of `trl-fused-grpo grpo` runs: TRL's own script for GRPO, with the fused trainer and its config."""

import runpy

from trl_fused_grpo import FusedGRPOConfig, patch
from trl_fused_grpo._compat.trl_cli import use_config


if __name__ == "__main__":
    use_config(FusedGRPOConfig)
    with patch():
        runpy.run_module("trl.scripts.grpo", run_name="__main__", alter_sys=True)
