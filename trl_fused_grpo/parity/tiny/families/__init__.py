"""
One tiny configuration of each model family and of each unusual head.

- `family`: what a family is, and the shape that all share
- `attention`, `experts`, `state`: text alone, by what is in their layers
- `composite_rope`, `composite`: text models with a vision tower, by the positions of image tokens
- `variants`: models of the cases that are about something else than a family
"""

from .attention import ATTENTION_FAMILIES
from .composite import COMPOSITE_FAMILIES
from .composite_rope import ROPE_FAMILIES
from .experts import EXPERT_FAMILIES
from .family import EOS_ID, FIRST_WORD_ID, IMAGE_ID, MARKER_ID, PAD_ID, UNK_ID, VOCAB_SIZE, Family
from .state import STATE_FAMILIES
from .variants import VARIANTS


__all__ = [
    "EOS_ID",
    "FAMILIES",
    "FIRST_WORD_ID",
    "IMAGE_ID",
    "MARKER_ID",
    "PAD_ID",
    "UNK_ID",
    "VARIANTS",
    "VOCAB_SIZE",
    "Family",
]

FAMILIES: dict[str, Family] = {
    **ATTENTION_FAMILIES,
    **EXPERT_FAMILIES,
    **STATE_FAMILIES,
    **ROPE_FAMILIES,
    **COMPOSITE_FAMILIES,
}
