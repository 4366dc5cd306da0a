"""The runs of each launch: which engine, which case, which trainer."""

from dataclasses import dataclass

from .adapters import HEADS, TOGETHER, Head


RANKS = 2
STEPS = 3
ACCUMULATION = 2
ROWS = 3  # completions to a micro-batch of one rank
SHARED = "shared-forward"
TWICE = "shared-twice"
# Lengths of completions of which two micro-batches fit into the limit and three do not, whatever their prompts
LENGTHS_OF_TWO, TOKENS_OF_TWO = (11, 13), 100
# The tiny model of each case that is about an architecture
ARCHITECTURES = {
    "deaf": "llama",
    "deaf-holes": "llama",
    "wide": "llama",
    "convolution": "lfm2",
    "sinks": "gpt-oss",
    "images": "qwen3-vl",
    "images-on-one": "qwen3-vl",
}


@dataclass(frozen=True)
class Run:
    """
    One training run.

    Attributes:
        backend (`str`):
            `"ddp"`, `"fsdp1"`, `"fsdp2"`, `"zero2"` or `"zero3"`.
        case (`str`):
            `"untied"` or `"tied"` embeddings; `"lora"`; `"reference"`: beta is not zero, and the trainer computes
            old and reference log-probs; `"bf16"`: the same under mixed precision; `"shared-forward"`: TRL splits the
            generation batch, and the micro-batches of an accumulation window share a forward, with one importance ratio
            a sequence; `"shared-twice"`: the four micro-batches of a window have two forwards, because of the limit of
            tokens; `"unequal"`: completions are much longer on one rank. Or one of [`adapters.HEADS`],
            [`adapters.TOGETHER`] and `ARCHITECTURES`.
        trainer (`str`):
            `"stock"`, `"dense"`: stock on log-probs from the model's own logits, `"fused"`, `"misled"`: fused, and
            rank 1 alone is given a wrong forecast, `"compiled"`: fused, with `fused_compile`, or `"verified"`: fused,
            with `fused_verify`.
    """

    backend: str
    case: str
    trainer: str

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.case}-{self.trainer}"

    @property
    def head(self) -> Head | None:
        return HEADS.get(self.case) or TOGETHER.get(self.case)

    @property
    def architecture(self) -> str | None:
        return ARCHITECTURES.get(self.case)

    @property
    def shares_forwards(self) -> bool:
        return self.case in (SHARED, TWICE, "unequal", "wide")

    @property
    def accumulation(self) -> int:
        """Micro-batches of a window."""
        return 2 * ACCUMULATION if self.case == TWICE else ACCUMULATION

    @property
    def most_tokens(self) -> int:
        """In a forward that micro-batches share."""
        return TOKENS_OF_TWO if self.case == TWICE else 1000

    @property
    def adapted(self) -> str:
        """Which adapter is trained, see [`adapters.adapter`]."""
        return self.case

    @property
    def data(self) -> str:
        """Name of the micro-batches."""
        return self.case if self.architecture or self.case in ("unequal", TWICE) else self.model

    @property
    def model(self) -> str:
        if self.architecture:
            return self.architecture
        return "tied" if self.case == "tied" or (self.head and self.head.tied) else "llama"

    @property
    def refers(self) -> bool:
        return self.case in ("reference", "bf16") or bool(self.head and self.head.refers)


def _runs(backend: str, *cases: str, misled: tuple[str, ...] = ()) -> list[Run]:
    runs = [Run(backend, case, trainer) for case in cases for trainer in ("stock", "fused")]
    return runs + [Run(backend, case, "misled") for case in misled]


def _fused(backend: str, *cases: str) -> list[Run]:
    return [Run(backend, case, "fused") for case in cases]


def _compiled(backend: str, *cases: str) -> list[Run]:
    return [Run(backend, case, "compiled") for case in cases]


def _verified(backend: str, *cases: str) -> list[Run]:
    return [Run(backend, case, "verified") for case in cases]


# What the engine cannot train with any trainer
REFUSED = [
    Run(backend, case, trainer)
    for backend, case in (
        ("fsdp2", "saved-head-tied"),
        ("fsdp2", "lora-head-together"),
        ("fsdp1", "saved-head-together"),
    )
    for trainer in ("dense", "fused")
]

# What `make test` has, of each engine and of each kind
QUICK_RUNS = (
    *_runs("ddp", "untied", "unequal", misled=("untied",)),
    Run("ddp", "wide", "stock"),
    *_runs("fsdp2", SHARED),
    *_fused("fsdp2", "lora-head", "wide"),
    *_verified("fsdp2", SHARED),
    *REFUSED[:2],
    *_runs("fsdp1", "reference"),
    *_runs("zero3", SHARED),
    *_runs("zero2", "untied"),
)
# DDP first: Accelerate leaves in the environment that FSDP was used
_EVERY_RUN = {
    "torch": [
        *_runs("ddp", "untied", "tied", "lora", SHARED, "unequal", misled=("untied",)),
        *_fused("ddp", "lora-head", "saved-head"),
        *_compiled("ddp", "untied"),
        *_verified("ddp", "lora", "shared-forward"),
        *_runs("fsdp2", "untied", "tied", "reference", "lora", SHARED, "unequal", misled=("untied", "tied")),
        *_fused("fsdp2", "lora-head", "lora-head-tied", "saved-head"),
        *_compiled("fsdp2", "reference", "lora"),
        *_verified("fsdp2", "shared-forward"),
        *_runs("fsdp1", "untied", "reference", SHARED, misled=("untied",)),
        *_fused("fsdp1", *HEADS),
        *_compiled("fsdp1", "untied"),
        *_runs("fsdp2", "bf16"),
        *REFUSED,
    ],
    "architectures": [
        *(Run("ddp", case, "stock") for case in ARCHITECTURES),
        *_fused("ddp", "deaf-holes", "images-on-one"),
        *_fused("fsdp2", "deaf", "wide", "convolution", "images", "sinks"),
    ],
    "deepspeed": [
        *_runs("zero3", "untied", "tied", "reference", "lora", SHARED, misled=("untied", "tied")),
        *_fused("zero3", "lora-head", "lora-head-tied", "saved-head", "saved-head-tied"),
        *_fused("zero3", "convolution", "sinks"),
        *_compiled("zero3", "untied", "lora"),
        *_runs("zero2", "untied", SHARED),
        *_fused("zero2", "lora-head", "saved-head"),
    ],
}
QUICK, QUICK_DEEPSPEED = "quick", "quick deepspeed"
LAUNCHES = {
    QUICK: [run for run in QUICK_RUNS if not run.backend.startswith("zero")],
    QUICK_DEEPSPEED: [run for run in QUICK_RUNS if run.backend.startswith("zero")],
    **{name: [run for run in runs if run not in QUICK_RUNS] for name, runs in _EVERY_RUN.items()},
}
# With tests of their own
NIGHTLY_LAUNCHES = {
    "two forwards": [*_runs("ddp", TWICE), *_runs("fsdp2", TWICE), *_runs("fsdp1", TWICE)],
    "two forwards with deepspeed": [*_runs("zero3", TWICE), *_runs("zero2", TWICE)],
}
