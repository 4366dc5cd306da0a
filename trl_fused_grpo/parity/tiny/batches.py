"""
Makes the data of a case, micro-batches and completions with padding on both sides, clipped ratios and masks, and gives
it to a trainer in place of its own generation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trl_fused_grpo._compat.trl_images import MULTIMODAL_INPUTS
from trl_fused_grpo.parity.case import Batch, Case, Rollout, Trainer

from .families import EOS_ID, FIRST_WORD_ID, IMAGE_ID, PAD_ID, VOCAB_SIZE
from .images import IMAGES, REPEATED_IMAGES, image_inputs, with_images


Data = list[dict[str, Any]]  # micro-batches, or one entry a generation

ROWS, GROUP = 6, 3  # completions in a micro-batch, and to a prompt
ADVANTAGES = (1.1, -0.7, 0.0, 0.6, -0.4, 0.9)  # one row needs no gradient, and the loss does not cancel to zero

# Old minus current log-probs. Ratios lie well inside or beyond 0.8 and 1.2 (clipping) and 2 (delta, cispo): bfloat16
# moves a log-prob by 0.04, which must not move a token across a bound, where the objective is not smooth.
_OLD_LEVELS = (-0.95, -0.42, -0.02, 0.0, 0.02, 0.45, 0.8)
_DRIFTS = (-0.42, 0.5, -0.42, 0.5, -0.42, 0.5)  # whole rows
# Training minus sampling log-probs, for clip bounds of 0.5 and 2.
_TOKEN_LEVELS = (-1.0, -0.3, 0.1, 0.2, 0.4, 1.0)
_SEQUENCE_LEVELS = (-1.23, 0.41, -0.31, 1.13, 0.21, -0.11)  # divided by a length they are on no bound


def _spread(levels: tuple[float, ...], shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Levels in turn from a random start: every longer row has all of them."""
    start = int(torch.randint(len(levels), (), generator=generator))
    return torch.tensor(levels)[(torch.arange(shape.numel()) + start) % len(levels)].view(shape)


def _in_turn(values: Sequence[Any], count: int) -> list[Any]:
    """As many values, from the first on again after the last."""
    return [values[i % len(values)] for i in range(count)]


def _words(length: int, generator: torch.Generator, end: int = VOCAB_SIZE) -> list[int]:
    return torch.randint(FIRST_WORD_ID, end, (length,), generator=generator).tolist()


def _padded(prompts: list[list[int]], completions: list[list[int]]) -> dict[str, Any]:
    """Ids and masks, with padding before the prompts and after the completions."""
    inputs = {}
    for name, rows in (("prompt", prompts), ("completion", completions)):
        width = max(map(len, rows))
        ids, mask = torch.full((len(rows), width), PAD_ID), torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            place = slice(width - len(row), width) if name == "prompt" else slice(0, len(row))
            ids[i, place] = torch.tensor(row, dtype=torch.long)
            mask[i, place] = 1
        inputs |= {f"{name}_ids": ids, f"{name}_mask": mask}
    return inputs


@torch.no_grad()
def log_probs(
    trainer: Trainer, inputs: dict[str, Any], batch_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Current log-probs and entropies `[B, T]` of a micro-batch's completion tokens, float32, on the CPU."""
    device = trainer.accelerator.device
    logps, entropies, *_ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1).to(device),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).to(device),
        inputs["completion_ids"].size(1),
        batch_size=batch_size,
        compute_entropy=True,
        **{name: copy_to(inputs[name], device) for name in MULTIMODAL_INPUTS if name in inputs},
    )
    return logps.float().cpu() * inputs["completion_mask"], entropies.float().cpu()


def make_data(case: Case, trainer: Trainer, seed: int, draws: int = 16) -> Data:
    """
    Make what a trainer gets in place of its own generation: micro-batches of a [`Batch`], completions of a [`Rollout`].

    Args:
        case ([`Case`]): what is compared.
        trainer ([`GRPOTrainer`]): computes the current log-probs, from which old, reference and sampling log-probs are
            made.
        seed (`int`): of tokens and offsets.
        draws (`int`): how many micro-batches are drawn for each under `top_entropy_quantile`. The one is taken whose
            entropies lie furthest from the quantile: rounding must not move a token across.
    """
    if isinstance(case.data, Rollout):
        return rollout(case, trainer, seed)
    return micro_batches(case, trainer, seed, draws)


def micro_batches(case: Case, trainer: Trainer, seed: int, draws: int) -> Data:
    """
    Micro-batches as `_prepare_inputs` would return them, see [`make_data`], one accumulation window after another.
    `num_items_in_batch` counts the tokens of the generation batch that a micro-batch belongs to.
    """
    spec = case.data
    assert isinstance(spec, Batch)
    args = trainer.args
    generator = torch.Generator().manual_seed(seed)
    count = args.gradient_accumulation_steps * case.accumulation_windows
    batches = [_micro_batch(spec, i, trainer, generator, draws) for i in range(count)]
    for start in range(0, count, args.steps_per_generation):
        members = batches[start : start + args.steps_per_generation]
        tokens = torch.stack([(b["completion_mask"] * b.get("tool_mask", 1)).sum() for b in members]).sum()
        for batch in members:
            batch["num_items_in_batch"] = tokens
    return batches


def _micro_batch(spec: Batch, index: int, trainer: Trainer, generator: torch.Generator, draws: int) -> dict[str, Any]:
    rows = trainer.args.per_device_train_batch_size
    inputs = _tokens(spec, rows, index, generator)
    if trainer.args.top_entropy_quantile < 1.0 and draws > 1:
        others = [_tokens(spec, rows, index, generator) for _ in range(draws - 1)]
        inputs = max(inputs, *others, key=lambda drawn: _entropy_gap(drawn, trainer))
    shape = inputs["completion_ids"].shape

    inputs["advantages"] = torch.tensor(_in_turn(ADVANTAGES, rows))
    if spec.token_advantages:
        inputs["advantages"] = inputs["advantages"].unsqueeze(1) * (1 + 0.5 * torch.rand(shape, generator=generator))

    current, _ = log_probs(trainer, inputs)
    far = _spread(_OLD_LEVELS, shape, generator)
    drifted = torch.tensor(_in_turn(_DRIFTS, rows)).unsqueeze(1) + _spread((-0.03, 0.03), shape, generator)
    if spec.old:
        moved = {"policy": torch.zeros(1), "far": far, "drifted": drifted}[spec.old]
        inputs["old_per_token_logps"] = current + moved
    if spec.reference:
        inputs["ref_per_token_logps"] = current + 0.3 * torch.randn(shape, generator=generator)
    if spec.sampling:
        inputs["sampling_per_token_logps"] = current + drifted
    if spec.ratio == "report":
        inputs["importance_sampling_ratio"] = torch.linspace(-6.9, -4.2, rows).exp().unsqueeze(1)
    return inputs


def _tokens(spec: Batch, rows: int, index: int, generator: torch.Generator) -> dict[str, Any]:
    end = IMAGE_ID if spec.images else VOCAB_SIZE
    prompt_lengths, lengths = (_in_turn(values, rows) for values in spec.lengths)
    prompts = [_words(n, generator, end) for n in prompt_lengths]
    copies = min(GROUP, rows) if spec.repeated_prompts else 1
    prompts[:copies] = prompts[:1] * copies
    images = _in_turn(REPEATED_IMAGES if spec.repeated_prompts else IMAGES, rows)
    if spec.images:
        prompts = with_images(prompts, images, spec.images)
    inputs = _padded(prompts, [_words(n, generator, end) for n in lengths])
    if spec.images:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        inputs |= image_inputs(spec.images, images, copies, ids, generator)
    for row in spec.empty_rows:
        inputs["completion_ids"][row] = PAD_ID
        inputs["completion_mask"][row] = 0
    if index in spec.empty_micro_batches:
        inputs["completion_mask"].zero_()
    if spec.tool_mask:
        inputs["tool_mask"] = (torch.rand(inputs["completion_ids"].shape, generator=generator) > 0.4).long()
        inputs["tool_mask"][:, 0] = 1  # every row keeps a token: empty rows have a case of their own
    return inputs


def _entropy_gap(inputs: dict[str, torch.Tensor], trainer: Trainer) -> float:
    """Distance between the entropies on both sides of the top-entropy threshold, in nats."""
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    entropies = log_probs(trainer, inputs)[1][mask.bool()].sort().values
    below = int((1 - trainer.args.top_entropy_quantile) * (len(entropies) - 1))
    return float(entropies[below + 1] - entropies[below])


def rollout(case: Case, trainer: Trainer, seed: int) -> Data:
    """Completions as a `rollout_func` returns them, see [`make_data`]. Prompts repeat within a group."""
    spec = case.data
    assert isinstance(spec, Rollout)
    generator = torch.Generator().manual_seed(seed)
    steps = trainer.args.steps_per_generation if case.mode == "train" else 1
    needed = trainer.args.gradient_accumulation_steps * case.accumulation_windows
    generations = -(-needed // steps)
    return [_generation(spec, trainer, steps, generator) for _ in range(generations)]


def _generation(spec: Rollout, trainer: Trainer, steps: int, generator: torch.Generator) -> dict[str, Any]:
    rows, group = trainer.args.per_device_train_batch_size, trainer.args.num_generations
    prompts, completions = [], []
    prompt_lengths, lengths = (_in_turn(values, rows) for values in spec.lengths)
    for i in range(rows * steps):
        prompts.append(prompts[-1] if i % group else _words(prompt_lengths[i % rows], generator))
        completion = _words(lengths[i % rows], generator)
        completions.append(completion if i in spec.truncated_rows else [*completion, EOS_ID])
    if spec.equal_completions:
        completions[:group] = completions[:1] * group
    answer: dict[str, Any] = {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}
    if spec.sampling:
        answer["logprobs"] = _sampler_log_probs(spec, trainer, prompts, completions, generator)
    if spec.env_mask:
        answer["env_mask"] = [[int(j % 3 != 1) for j in range(len(ids))] for ids in completions]
    return answer


def _sampler_log_probs(
    spec: Rollout, trainer: Trainer, prompts: list[list[int]], completions: list[list[int]], generator: torch.Generator
) -> list[list[float | None]]:
    inputs = _padded(prompts, completions)
    current, _ = log_probs(trainer, inputs)
    if spec.sampling == "token":
        ahead = _spread(_TOKEN_LEVELS, current.shape, generator)
    else:
        levels = torch.tensor(_in_turn(_SEQUENCE_LEVELS, len(prompts)))
        ahead = (levels / inputs["completion_mask"].sum(1)).unsqueeze(1).expand_as(current)
    given = [row[: len(ids)].tolist() for row, ids in zip(current - ahead, completions, strict=True)]
    # TRL writes None for a log-prob that vLLM did not give
    return [[None, *row[1:]] for row in given] if spec.nan else given


def serve_rollouts(trainer: Trainer, generations: list[dict[str, Any]]) -> None:
    """
    Have a trainer generate prepared completions, one entry a generation in training. An evaluation gets the first rows
    of the first entry.
    """
    answer = answers(trainer, generations)

    def single_turn(prompts: list[Any]) -> tuple[list, list, list | None, dict]:
        rollout = answer(len(prompts))
        return rollout["prompt_ids"], rollout["completion_ids"], rollout["logprobs"], {}

    trainer.rollout_func = lambda prompts, trainer: answer(len(prompts))
    trainer._generate_single_turn = single_turn  # TRL 0.27 calls rollout_func only when vLLM runs


def answers(trainer: Trainer, generations: list[dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    """Return a function that takes a number of prompts and gives their completions, see [`serve_rollouts`]."""
    remaining = iter(generations)

    def answer(count: int) -> dict[str, Any]:
        if trainer.model.training:
            return dict(next(remaining))
        return {name: value and value[:count] for name, value in generations[0].items()}

    return answer


def serve_batches(trainer: Trainer, batches: list[dict[str, Any]]) -> None:
    """Have a trainer's `_prepare_inputs` return copies of `batches` on its device, one a call."""
    remaining = iter(batches)

    def prepare(_: Any) -> dict[str, Any]:
        return {name: copy_to(value, trainer.accelerator.device) for name, value in next(remaining).items()}

    trainer._prepare_inputs = prepare


def serves_batches(trainer: Trainer) -> bool:
    """Return `True` if a trainer's micro-batches come from [`serve_batches`]."""
    return getattr(vars(trainer).get("_prepare_inputs"), "__module__", None) == __name__


def copy_to(value: Any, device: torch.device) -> Any:
    """Copy a tensor to a device; return anything else as it is."""
    return value.clone().to(device) if isinstance(value, torch.Tensor) else value
