"""Attention of packed sequences in plain float64 operations, one sequence after the other. Imports nothing of ours."""

import torch


def visible(queries, keys, window=None, chunk=None, device=None):
    """Which of its `keys` each of the last `queries` tokens of a sequence sees `[queries, keys]`."""
    q = torch.arange(keys - queries, keys, device=device)[:, None]
    k = torch.arange(keys, device=device)
    mask = k <= q
    if window is not None:
        mask &= k > q - window
    if chunk is not None:
        mask &= k // chunk == q // chunk
    return mask


def one_sequence(q, k, v, scaling, window=None, chunk=None, softcap=None, sinks=None):
    """From `[heads, s, D]`, `[key heads, k, D]` twice to `[s, heads, D of values]`."""
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = visible(q.shape[1], k.shape[1], window, chunk, q.device)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[1], 1)], dim=-1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1)


def packed_attention(query, key, value, lengths, key_lengths, index=None, **options):
    """
    From `[1, heads, S, D]` to `[1, S, heads, D of values]`.

    Args:
        lengths, key_lengths (`list[int]`): tokens of each sequence, and those that it sees.
        index (`list[int]`, optional): where in the row each of the seen tokens stands; by default it is the row itself.
        options: of [`one_sequence`].
    """
    if index is not None:
        index = torch.tensor(index, device=key.device)
        key, value = key[:, :, index], value[:, :, index]
    parts = query[0].split(lengths, 1), key[0].split(key_lengths, 1), value[0].split(key_lengths, 1)
    return torch.cat([one_sequence(*part, **options) for part in zip(*parts, strict=True)])[None]
