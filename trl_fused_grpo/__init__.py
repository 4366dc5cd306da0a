"""Drop-in `GRPOTrainer` for TRL whose fused loss trains exactly what TRL's own loss trains."""

from . import _trl_compat


_trl_compat.check_host()

from .config import FusedGRPOConfig as FusedGRPOConfig  # noqa: E402
from .fused_linear import FusedStats as FusedStats  # noqa: E402
from .fused_linear import fused_linear_logps as fused_linear_logps  # noqa: E402
from .lm_head import LMHead as LMHead  # noqa: E402
from .loss import FusedLinearGRPOLoss as FusedLinearGRPOLoss  # noqa: E402
from .patching import patch as patch  # noqa: E402
from .trainer import FusedGRPOTrainer as FusedGRPOTrainer  # noqa: E402


__version__ = "0.1.0"
