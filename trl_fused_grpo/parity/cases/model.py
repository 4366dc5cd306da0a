"""Cases of the model: one for each model family, and one for each kind of output projection."""

from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.parity.case import FAR, Batch, Case
from trl_fused_grpo.parity.tiny.families import FAMILIES, Family


NOISE = 0.05  # families initialize biases and norms to constants, which hide errors


def families() -> list[Case]:
    """Of each family; one with images has a case with them and one, named `-text`, without."""
    cases = []
    for name, family in FAMILIES.items():
        if family.images is not None:
            cases.append(_of_family(name, name, family, family.images))
        cases.append(_of_family(f"{name}-text" if family.images else name, name, family, None))
    return cases


def _of_family(name: str, model: str, family: Family, images: str | None) -> Case:
    about = [family.config.removesuffix("Config")]
    if family.has_aux_loss:
        about.append("auxiliary loss" if trl_compat.RETURNS_AUX_LOSS else "this TRL adds no auxiliary loss")
    if family.scale != 1.0:
        about.append(f"logits times {family.scale:g}")
    if family.softcap is not None:
        about.append("softcap")
    if family.images is not None:
        about.append("images" if images else "text alone")
    return Case(
        name,
        ", ".join(about),
        {"router_aux_loss_coef": 0.3 if family.has_aux_loss else 0.0} if trl_compat.RETURNS_AUX_LOSS else {},
        Batch(old="far", images=images, repeated_prompts=True),
        model=model,
        frozen=family.flat,
        noise=NOISE,
        stock_fails=family.stock_fails,
        compare_bf16=not family.has_aux_loss,
        # Of a text model that another family lends, Liger replaces the layers for the whole process, unasked
        compare_liger="model_type" not in family.options,
    )


def heads() -> list[Case]:
    warm = {"temperature": 0.7}
    return [
        Case("head-bias", "bias (Phi)", {}, FAR, model="biased", noise=NOISE),
        Case("head-logit-scale", "logit scale under temperature 0.7 (Cohere)", warm, FAR, model="scaled", noise=NOISE),
        Case("head-softcap", "softcap under temperature 0.7 (Gemma3)", warm, FAR, model="gemma3", noise=NOISE),
        Case("head-vocabulary", "vocabulary larger than the tokenizer's", {}, FAR, model="wide"),
        Case("head-modules-to-save", 'modules_to_save=["lm_head"]', {}, FAR, adapter="head-copy", noise=0.02),
        Case(
            "head-lora",
            "LoRA on lm_head; against dense logits where TRL refuses it",
            {},
            FAR,
            adapter="head",
            noise=0.02,
        ),
    ]
