"""Everything public, which the package gives out."""

from ._compat import required as _required  # noqa: F401 - first: it refuses a TRL that the rest cannot build upon
from .config import FusedGRPOConfig as FusedGRPOConfig
from .fusing import FusedRLOOConfig as FusedRLOOConfig
from .fusing import fuse as fuse
from .fusing import fuse_config as fuse_config
from .loss.liger_loss import FusedLinearGRPOLoss as FusedLinearGRPOLoss
from .modeling.head.output_projection import read_hidden_states as read_hidden_states
from .modeling.head.output_projection import read_lm_head as read_lm_head
from .ops.linear_logps import FusedStats as FusedStats
from .ops.linear_logps import fused_linear_logps as fused_linear_logps
from .ops.lm_head import LMHead as LMHead
from .patching import patch as patch
from .rloo import FusedRLOOTrainer as FusedRLOOTrainer
from .trainer import FusedGRPOTrainer as FusedGRPOTrainer
