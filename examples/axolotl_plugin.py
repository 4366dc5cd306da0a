"""
The fused loss in axolotl, through a plugin. A file that axolotl can import, named in its YAML file:

    plugins: [axolotl_plugin.FusedGRPOPlugin]
    rl: grpo

axolotl defines its trainer after it has registered plugins, and so on top of the patched `trl.GRPOTrainer`. Options
stand here, in `OPTIONS`. Written against axolotl 0.19.0 and not run with it: `fused/rows_recomputed` in the log tells
that a training is fused.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin  # ty: ignore[import-not-found]

import trl_fused_grpo


OPTIONS: dict[str, Any] = {"fused_memory": 0.9}


class FusedGRPOPlugin(BasePlugin):
    """Fuses `rl: grpo` and `rl: gdpo`, except with trainers of axolotl that replace TRL's log-probs or generation."""

    def register(self, cfg: Any) -> None:
        if cfg.get("rl") not in ("grpo", "gdpo"):
            return
        section = cfg.get("trl") or {}
        if section.get("async_prefetch") or section.get("use_data_producer"):
            raise ValueError("axolotl's asynchronous GRPO cannot be fused.")
        if (cfg.get("context_parallel_size") or 1) > 1:
            raise ValueError("axolotl's context parallelism cannot be fused.")
        trl_fused_grpo.patch(**OPTIONS)
