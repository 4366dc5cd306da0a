"""Engines by features: what is trained in which engine, in which launch, on what a model generates."""

from dataclasses import dataclass, field, replace
from typing import Any


STEPS = 3
PROMPTS = 48
GENERATIONS = 3
ROWS = 24  # of a generation batch, of all processes
ENGINES = ("ddp", "fsdp1", "fsdp2", "zero2", "zero3")


@dataclass(frozen=True)
class Feature:
    """
    What is trained, and how.

    Attributes:
        model (`str`):
            `"text"`, `"tied"`, whose embeddings are tied, or `"images"`.
        lora, saved (`tuple[str, ...]`):
            Modules with LoRA, and `modules_to_save`.
        precision (`str`):
            Of Accelerate's mixed precision.
        options (`dict`):
            For every trainer.
        fused_options (`dict`):
            For the fused one.
        tools (`bool`):
            Whether completions call tools.
        forwards (`int`, *optional*):
            Forwards with gradient of an accumulation window.
        engines (`tuple[str, ...]`):
            Under which it is trained.
        algorithm (`str`):
            `"grpo"` or `"rloo"`.
    """

    model: str = "text"
    lora: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    precision: str = "no"
    options: dict[str, Any] = field(default_factory=dict)
    fused_options: dict[str, Any] = field(default_factory=lambda: {"fused_max_tokens_per_forward": 10_000})
    tools: bool = False
    forwards: int = 1
    engines: tuple[str, ...] = ENGINES
    algorithm: str = "grpo"


_ATTENTION = ("q_proj", "v_proj")
# FSDP2 cannot shard a head of its own beside the embedding that it was tied to, and the constructor refuses it
_SHARDS_TIED_HEADS = tuple(engine for engine in ENGINES if engine != "fsdp2")
# Further losses whose gradient no split of the rows changes. Only after the first step have ratios other than one
LOSSES = {
    name: Feature(options={"num_iterations": 2, "loss_type": name, **options}, engines=("ddp",))
    for name, options in {
        "dr_grpo": {},
        "cispo": {"epsilon_high": 5.0},
        "sapo": {},
        "luspo": {"importance_sampling_level": "sequence"},
        "vespo": {},
    }.items()
}
# With ratios of whole sequences from 0.1 to 11 in the second step, few of which are clipped
RLOO = {
    name: Feature(
        options={"num_iterations": 2, "beta": beta, "learning_rate": 0.01, "epsilon": 0.9, "epsilon_high": 10.0},
        engines=("ddp", "fsdp2", "zero3"),
        algorithm="rloo",
    )
    for name, beta in (("rloo", 0.0), ("rloo-beta", 0.1))
}
FEATURES = {
    "full": Feature(),
    "tied": Feature("tied"),
    "lora": Feature(lora=_ATTENTION),
    "lora-head": Feature(lora=(*_ATTENTION, "lm_head")),
    "lora-head-tied": Feature("tied", lora=(*_ATTENTION, "lm_head")),
    "saved-head": Feature(lora=_ATTENTION, saved=("lm_head",)),
    "saved-head-tied": Feature("tied", lora=_ATTENTION, saved=("lm_head",), engines=_SHARDS_TIED_HEADS),
    "grpo": Feature(options={"loss_type": "grpo"}),
    "beta": Feature(options={"beta": 0.2}),
    "beta-lora": Feature(lora=_ATTENTION, options={"beta": 0.2, "loss_type": "grpo"}),
    "two-iterations": Feature(options={"num_iterations": 2}),
    "sequence-ratios": Feature(options={"num_iterations": 2, "importance_sampling_level": "sequence"}),
    "own-forwards": Feature(fused_options={"fused_max_tokens_per_forward": 0}, forwards=2),
    "shared": Feature(fused_options={"fused_max_tokens_per_forward": 10_000}),
    "checkpointed": Feature(options={"gradient_checkpointing": True}),
    "tools": Feature(tools=True, options={"max_completion_length": 120}),
    "images": Feature("images"),
    "images-lora": Feature("images", lora=_ATTENTION),
    "bf16": Feature(precision="bf16"),
    "fp16": Feature(precision="fp16"),
    **LOSSES,
    **RLOO,
}
HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class Training:
    """
    One training.

    Attributes:
        engine (`str`):
            One of `ENGINES`, or `"one"`: one process trains on the rows of all.
        feature (`str`):
            One of `FEATURES`.
        trainer (`str`):
            `"stock"`, `"fused"`, `"dense"`: stock on log-probs from the model's own logits, or `"exact"`: stock in
            float32 beside half precision, and in float64 beside float32.
        processes (`int`):
            How many there are, or for how many the one stands.
        micro_batches (`int`):
            Into which the generation batch of each process is split.
    """

    engine: str
    feature: str
    trainer: str = "fused"
    processes: int = 2
    micro_batches: int = 2

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.feature}-{self.trainer}-{self.processes}x{self.micro_batches}"

    @property
    def rows(self) -> int:
        """Of a generation batch, of each process."""
        return ROWS // self.processes

    @property
    def of(self) -> Feature:
        return FEATURES[self.feature]

    @property
    def precision(self) -> str:
        return "no" if self.trainer == "exact" else self.of.precision

    @property
    def is_double(self) -> bool:
        return self.trainer == "exact" and self.of.precision == "no"

    def with_trainer(self, trainer: str) -> "Training":
        return replace(self, trainer=trainer)

    def alone(self, trainer: str = "stock") -> "Training":
        """The same rows in one process."""
        return replace(self, engine="one", trainer=trainer)


# The same rows in other micro-batches; their loss is a sum over all rows
SPLITS = [("full", 1), ("full", 12), ("grpo", 3), *((loss, n) for loss in LOSSES for n in (1, 12))]


def _table(*engines: str) -> list[Training]:
    trainings = [Training(engine, feature) for engine in engines for feature in FEATURES]
    trainings += [Training(engine, feature, micro_batches=n) for engine in engines for feature, n in SPLITS]
    # compared with stock's in the same engine, which rounds as well
    trainings += [Training(engine, feature, "stock") for engine in engines for feature in (*HALF, *RLOO)]
    return [training for training in trainings if training.engine in training.of.engines]


# DDP first: Accelerate leaves in the environment that FSDP was used
LAUNCHES = {
    "torch": _table("ddp", "fsdp2", "fsdp1"),
    "deepspeed": _table("zero3", "zero2"),
    "nodes": [
        *(Training("ddp", feature, processes=4) for feature in ("full", "shared", *LOSSES)),
        Training("ddp", "full", processes=4, micro_batches=6),
        *(Training("fsdp2", feature, processes=4) for feature in ("full", "lora", "tools")),
    ],
    "nodes with deepspeed": [Training("zero3", feature, processes=4) for feature in ("full", "lora")],
}
