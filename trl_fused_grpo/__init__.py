"""Drop-in `GRPOTrainer` for TRL whose fused loss trains exactly what TRL's own loss trains."""

from . import _trl_compat as _trl_compat  # first: it refuses a TRL that the rest cannot build upon
from .config import FusedGRPOConfig as FusedGRPOConfig
from .fused_linear import FusedStats as FusedStats
from .fused_linear import fused_linear_logps as fused_linear_logps
from .lm_head import LMHead as LMHead
from .loss import FusedLinearGRPOLoss as FusedLinearGRPOLoss
from .patching import patch as patch
from .trainer import FusedGRPOTrainer as FusedGRPOTrainer


__version__ = "0.1.0"
