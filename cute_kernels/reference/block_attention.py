"""Attention of block rows over a paged context and over each other, dense; and the work list that splits it."""

import torch

from cute_kernels.reference.rotation import accumulation_dtype


def block_attention(
    q: torch.Tensor,
    block_latents: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    context_len: torch.Tensor,
    *,
    scale: float,
    value_width: int,
    layer: int = 0,
    context_start: torch.Tensor | None = None,
    plan: object = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """out[b, s, h] = sum_t softmax_t(scale * q[b, s, h] . latent[b, t]) * latent[b, t, :c]; non-causal.

    t runs over positions context_start[b] .. context_len[b]-1 of request b's context and over all S rows of its block.
    Only live rows are gathered, so that what lies in unread pages and table entries cannot matter. A live page that does
    not exist holds zeros.

    Args:
        q: [B, S, H, W]. block_latents: [B, S, W]. pages: [num_pages, P, W]. page_table: [B, max_pages], integer.
        context_len: [B], integer; read as at least 0 and at most max_pages * P. context_start: [B] or None for 0.
        scale: softmax scale. value_width: c. layer, plan: not used. out: [B, S, H, c]. lse: [B, S, H], fp32.
        return_lse: also return it.
    Returns:
        [B, S, H, c] in q's dtype; with return_lse also [B, S, H], log2 of the sum of exponentials.
    Numerics: fp32, fp64 where q is fp64; rounded once.
    """
    batch, rows, heads, width = q.shape
    wide = accumulation_dtype(q.dtype)
    out = q.new_empty(batch, rows, heads, value_width) if out is None else out
    lse = q.new_empty(batch, rows, heads, dtype=wide) if lse is None else lse
    for b in range(batch):
        start = 0 if context_start is None else max(int(context_start[b]), 0)
        stop = min(int(context_len[b]), page_table.shape[1] * pages.shape[1])
        position = torch.arange(start, max(start, stop), device=q.device)
        page = page_table[b, position // pages.shape[1]].long()
        exists = (page >= 0) & (page < pages.shape[0])
        context = block_latents.new_zeros(len(position), width)
        context[exists] = pages[page[exists], (position % pages.shape[1])[exists]]
        latents = torch.cat((context, block_latents[b])).to(wide)
        scores = scale * (q[b].to(wide) @ latents.T)  # [S, H, tokens]
        out[b] = (scores.softmax(-1) @ latents[:, :value_width]).to(out.dtype)
        lse[b] = (scores.logsumexp(-1) / torch.log(torch.tensor(2.0, dtype=wide))).to(lse.dtype)
    return (out, lse) if return_lse else out


def plan_block_attention(
    context_len: torch.Tensor,
    context_start: torch.Tensor | None,
    requests: torch.Tensor,
    boundaries: torch.Tensor,
    aligned: bool = False,
    *,
    block_rows: int,
    max_context: int,
    block_tokens: int = 32,
    item_cost: int = 2,
    min_quantum: int = 2,
    most_separate: int = 256,
    most_tried: int = 8,
    joins: bool = False,
) -> None:
    """Cut the tiles of a batch into parts.

    The batch is a line of costs: per request item_cost, then one for each tile. An equal share of it is the quantum.
    Separate list: a request of n tiles has ceil(n / longest) parts of its own, cut evenly, where `longest` is the least number
    of tiles with which the parts suffice. It is looked for from quantum - item_cost, as every piece pays item_cost, up to
    quantum + quantum // 32, as pieces are fewer. With `joins`, two parts each where that is no longer than quantum + quantum //
    32 (and 2 * batch <= parts < 3 * batch, an even number of parts); of a request of one tile the second part is empty.
    Contiguous list, where that finds none: part p begins at cost p * quantum; a cut inside an item_cost falls on the request's
    first tile.

    Args:
        aligned: tiles begin at positions that block_tokens divides, and the block is a tile of its own behind them.
        context_len, context_start: [B], integer; start None is 0. block_rows: S. max_context: tokens a table's row holds.
        block_tokens: of a tile. item_cost: of a request. min_quantum: least cost of a part, and least `longest`.
        most_separate: requests; of more, the list is contiguous. most_tried: values of `longest` that are tried.
        joins: whether parts 2i and 2i + 1 of a request leave one result.
        requests: [B, 4], int32, written: first position, context tokens, part of the first tile, number of pieces; -1
            where two parts are joined.
        boundaries: [parts + 1, 4], int32, written: the request and tile where each part begins, and the request's first two
            numbers; (B, 0, 0, 0) is the end.
    """
    parts = len(boundaries) - 1
    starts = [0] * len(context_len) if context_start is None else [max(n, 0) for n in context_start.tolist()]
    contexts = [max(min(stop, max_context) - start, 0) for start, stop in zip(starts, context_len.tolist(), strict=True)]
    tiles = [-(-(context + block_rows) // block_tokens) for context in contexts]
    if aligned:
        tiles = [
            1 + (-(-(start + context) // block_tokens) - start // block_tokens if context else 0)
            for start, context in zip(starts, contexts, strict=True)
        ]
    quantum = max(min_quantum, -(-sum(item_cost + n for n in tiles) // parts))
    longest, half = 0, -(-max(tiles) // 2)
    if len(tiles) <= most_separate:
        least = max(min_quantum, quantum - item_cost)
        fits = range(least, min(least + most_tried, quantum + quantum // 32 + 1))
        longest = next((most for most in fits if sum(-(-count // most) for count in tiles) <= parts), 0)
        joins = joins and parts % 2 == 0 and 2 * len(tiles) <= parts < 3 * len(tiles)
    joined = joins and len(tiles) <= most_separate and half <= quantum + quantum // 32
    boundaries[:] = torch.tensor([len(tiles), 0, 0, 0])
    begin = 0  # on the line of costs; of a separate list, in parts
    for request, count in enumerate(tiles):
        if joined:
            first, pieces = 2 * request, -1 if count > 1 else 1
            boundaries[first, :2] = torch.tensor([request, 0])
            boundaries[first + 1, :2] = torch.tensor([request, -(-count // 2)] if count > 1 else [request + 1, 0])
        elif longest:
            first, pieces = begin, -(-count // longest)
            begin += pieces
            for piece in range(pieces):
                boundaries[first + piece, :2] = torch.tensor([request, -(-piece * count // pieces)])
        else:
            end = begin + item_cost + count
            for part in range(-(-begin // quantum), -(-end // quantum)):
                boundaries[part, :2] = torch.tensor([request, max(part * quantum - begin - item_cost, 0)])
            first = (begin + item_cost) // quantum
            pieces = (end - 1) // quantum - first + 1
            begin = end
        requests[request] = torch.tensor([starts[request], contexts[request], first, pieces])
    begun = boundaries[:, 0] < len(tiles)
    boundaries[begun, 2:] = requests[boundaries[begun, 0].long(), :2]
