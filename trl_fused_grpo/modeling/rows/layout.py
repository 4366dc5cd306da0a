"""How the rows of a micro-batch are laid out for the model: packed, or padded as TRL pads them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trl_fused_grpo.modeling.attention.varlen import SharedPrefixKV, cu_seqlens_arguments


_HASH_BASE = 6364136223846793005  # any odd number of 64 bits


@dataclass(frozen=True)
class Layout:
    """What the model is called with, and where the predictions are found."""

    model_inputs: dict[str, Any]  # keyword arguments of the model
    # [B, T]: where in the flat hidden states the token before each completion token is; `None` with TRL's padding
    logit_positions: Tensor | None = None
    row: "PackedRow | None" = None  # what stands in the row, where it is packed


@dataclass(frozen=True)
class PackedRow:
    """What stands in a packed row."""

    index: Tensor  # [S]: flat position in TRL's padded batch `[B, P + T]` of each token
    lengths: list[int]  # tokens of each sequence in the row
    has_prompt: list[bool]  # for each of the `B` sequences, whether its prompt stands in the row under it
    shares_prompts: bool = False  # whether sequences may attend to a prompt under another one
    has_images: bool = False  # whether there are images in the row


class HolesError(ValueError):
    """Rows of a batch are not one sequence each, so that only TRL's padding fits them."""


@dataclass(frozen=True)
class Rows:
    """The rows of a sub-batch."""

    input_ids: Tensor  # [B, P + T], prompts padded left and completions right
    attention_mask: Tensor  # [B, P + T]
    completion_length: int  # T
    selected: Tensor  # [B, T], bool: the tokens whose log-probability is read
    wanted: Tensor  # [B], bool: the sequences that the model must see; others may be left out
    needs_last_column: bool = False
    image_keys: Tensor | None = None  # [B]

    def with_holes(self, mask: Tensor) -> Tensor:
        """
        Rows `[B]` that are not one sequence each under a `mask` `[B, L]`: tokens that do not follow one another, or a
        token whose log-prob is read behind a masked column, from whose state TRL predicts it.
        """
        start = mask.shape[1] - self.completion_length
        begins = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]  # [B]
        behind = self.selected[:, 0 if start else 1 :] & ~mask[:, max(start - 1, 0) : -1]  # [B, T]
        return (begins > 1) | behind.any(1)


def packed(rows: Rows, share_prompts: bool) -> Layout:
    """The micro-batch as one row without padding, one sequence after the other."""
    input_ids, width = rows.input_ids, rows.input_ids.shape[1]
    start = width - rows.completion_length
    mask, kept, owner = _tokens_to_pack(rows, share_prompts)
    # A synchronisation with the device; keys take another
    flags = rows.with_holes(mask).long(), kept[:, -1].long(), kept[:, :start].any(1).long()
    lengths, key_lengths, holes, ends, has_prompt = torch.stack([kept.sum(1), mask.sum(1), *flags]).tolist()
    if any(holes) or not any(lengths):
        raise HolesError("there are holes in the attention mask of some rows")
    place = _running_number(kept)  # [B, L], position of each token in the packed row
    index = _where(kept, place, sum(lengths))  # [S]
    # Where to find the tokens that each sequence sees, its prompt with the prompt's owner
    seen_at = torch.cat([place[owner, :start], place[:, start:]], dim=1)  # [B, L]
    first = seen_at[:, start - 1 : start] if start else place[:, :1] - 1
    keys = None
    if share_prompts:  # also where no two are the same: a compiled layer has one code for both
        seen = _where(mask, _running_number(mask), sum(key_lengths))  # [K]
        keys = seen_at.flatten()[seen]
    key_lengths = [seen for length, seen in zip(lengths, key_lengths, strict=True) if length]
    lengths = [length for length in lengths if length]
    if rows.needs_last_column and not any(ends):
        # The padding in the last column, a sequence of its own: rotary factors follow the longest position
        keys = None if keys is None else torch.cat([keys, keys.new_full((1,), len(index))])
        index = torch.cat([index, index.new_full((1,), width - 1)])
        lengths, key_lengths = [*lengths, 1], [*key_lengths, 1]
    shared = None if keys is None else SharedPrefixKV.at(keys, len(index))
    model_inputs = {
        "input_ids": input_ids.flatten()[index].unsqueeze(0),
        # The columns of TRL's padded rows: the same distances for rotary models, the same positions for absolute ones
        "position_ids": (index % width).unsqueeze(0),
        **cu_seqlens_arguments(lengths, key_lengths, shared, input_ids.device),
    }
    row = PackedRow(index, lengths, [bool(flag) for flag in has_prompt], share_prompts)
    return Layout(model_inputs, torch.cat([first, place[:, start:-1]], dim=1), row)


def _tokens_to_pack(rows: Rows, share_prompts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """
    Which tokens the model sees.

    Returns:
        `tuple`:
            The tokens of each sequence `[B, L]`, those among them that stand in the packed row under this sequence
            `[B, L]`, and the sequence `[B]` under which each one's prompt stands.
    """
    input_ids, wanted = rows.input_ids, rows.wanted
    size, width = input_ids.shape
    start = width - rows.completion_length
    number = torch.arange(size, device=input_ids.device)
    wanted = wanted | (number == 0) & ~wanted.any()  # never an empty row
    mask = rows.attention_mask.bool() & wanted.unsqueeze(1)
    if not share_prompts or size < 2:
        return mask, mask, number
    prompt_ids, prompt_mask = input_ids[:, :start], mask[:, :start]
    if rows.image_keys is not None:  # as a token of the prompt
        prompt_ids = torch.cat([rows.image_keys.unsqueeze(1), prompt_ids], dim=1)
        prompt_mask = torch.cat([torch.ones_like(prompt_mask[:, :1]), prompt_mask], dim=1)
    first = first_with_the_prompt(prompt_ids, prompt_mask)
    owner = torch.where(mask[:, start:].any(1), first, number)  # one that ends in its prompt keeps it
    is_completion = torch.arange(width, device=number.device) >= start
    return mask, mask & ((owner == number).unsqueeze(1) | is_completion), owner


def first_with_the_prompt(prompt_ids: Tensor, prompt_mask: Tensor) -> Tensor:
    """The number `[B]` of the first sequence with the prompt of each, from prompts and their mask `[B, P]`, bool."""
    prompts = prompt_ids.long().masked_fill(~prompt_mask, -1)  # [B, P]
    # A polynomial of the token ids, modulo 2^64, finds candidates; what counts is whether they are the same
    powers = torch.full_like(prompts[0], _HASH_BASE).cumprod(0)
    hashes = (prompts * powers).sum(1)  # [B]
    first = (hashes.unsqueeze(1) == hashes).byte().argmax(1)
    rows = torch.arange(len(prompts), device=prompts.device)
    return torch.where((prompts[first] == prompts).all(1), first, rows)


def _running_number(mask: Tensor) -> Tensor:
    """Number of the last true entry up to each, counted row by row `[B, L]`; -1 before the first."""
    return mask.flatten().cumsum(0).view_as(mask) - 1


def _where(mask: Tensor, number: Tensor, count: int) -> Tensor:
    """Flat positions of the `count` true entries `[count]`, from their running `number`, without a synchronisation."""
    places = torch.where(mask, number, count).flatten()
    index = torch.empty(count + 1, dtype=torch.long, device=mask.device)
    return index.scatter_(0, places, torch.arange(len(places), device=mask.device))[:count]


# Rows of TRL's asynchronous trainer, in which samples with a common prefix share its tokens: a prefix trie


class TrieLayout(NamedTuple):
    """What the model is called with for a trie, and where its tokens are then."""

    model_inputs: dict[str, Any]  # keyword arguments of the model
    lengths: list[int]  # tokens of each sequence in the row
    places: Tensor | None  # [S]: where each token of the trie stands in the row; `None` where that is its own place


def of_trie(
    input_ids: Tensor,  # [1, S]
    position_ids: Tensor,  # [1, S]
    kv_index: Tensor,  # [K]: where the tokens stand that each segment attends to, from the root to its own
    cu_seqlens_q: Tensor,  # [segments + 1]: where segments begin in the row
    cu_seqlens_k: Tensor,  # [segments + 1]: where those of each begin in `kv_index`
    shares_prefixes: bool,
) -> TrieLayout:
    """A trie's row as it is, or where prefixes are not shared the samples one behind the other: each ends at a leaf."""
    size, lengths, key_lengths = input_ids.shape[1], cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    places, keys = None, None
    if shares_prefixes:  # also where no two are the same, as in packed rows: a compiled layer has one code for both
        keys = SharedPrefixKV.at(kv_index, size)
    elif lengths != key_lengths:
        uses = torch.bincount(kv_index, minlength=size)
        is_leaf = uses[cu_seqlens_q[1:].long() - 1] == 1  # no other has its last token
        kv_index = kv_index[is_leaf.repeat_interleave(cu_seqlens_k.diff().long())]
        places = SharedPrefixKV.at(kv_index, size).first
        input_ids, position_ids = input_ids[:, kv_index], position_ids[:, kv_index]
        lengths = key_lengths = cu_seqlens_k.diff()[is_leaf].tolist()
    boundaries = cu_seqlens_arguments(lengths, key_lengths, keys, input_ids.device)
    return TrieLayout({"input_ids": input_ids, "position_ids": position_ids, **boundaries}, lengths, places)
