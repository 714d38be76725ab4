"""Packed blocks to training rows: documents laid end to end, and the (anchor, depth) slots that the drafter learns from."""

from dataclasses import dataclass

import torch


def sample_slots(
    loss_mask,
    document_ids,
    num_depths: int,
    cod_ratio: float,
    cod_floor: float,
    max_anchors=None,
    generator=None,
    first_slot: bool = False,
):
    """Conditional-drop-token (COD) sampling: which slots of a packed row to train, and which of them carry a loss.

    All slots of depth 0 are kept, as they are the context of the others. A slot of depth d is a candidate if its whole
    chain, depths 0 to d of one anchor, predicts supervised tokens of one document; `max(cod_ratio ** d, cod_floor)` of the
    candidates are kept, nested: only where depth d - 1 was kept. From PARD (https://huggingface.co/papers/2504.18583).

    Args:
        loss_mask (`torch.BoolTensor` of shape `(tokens,)`): The tokens that the target generated.
        document_ids (`torch.LongTensor` of shape `(tokens,)`): The document of each token; documents are contiguous.
        num_depths (`int`): Depths to train.
        cod_ratio (`float`), cod_floor (`float`): See above; a ratio of 1 keeps everything.
        max_anchors (`int`, *optional*): Most slots of any depth beyond 0, which bounds the memory.
        first_slot (`bool`): Whether the first token of a document has a slot too, as in `slot_layout`. It is only context,
            as decoding starts behind the target's features of at least one token.

    Returns:
        `(anchor, depth, scored)`: `torch.LongTensor` of shape `(slots,)` twice, ordered by depth, and the indices of the
        slots that carry a loss, shape `(rows,)`. Slot (a, d) predicts token a + 2 + d.
    """
    tokens = len(loss_mask)
    position = torch.arange(tokens)
    kept = candidates = position[:-1][document_ids[:-1] == document_ids[1:]]
    context = position - 1 if first_slot else candidates
    anchors, depths, scored = [context], [torch.zeros_like(context)], []
    for depth in range(num_depths):
        inside = (candidates + 2 + depth) < tokens
        candidates = candidates[inside]
        label = candidates + 2 + depth
        candidates = candidates[loss_mask[label] & (document_ids[label] == document_ids[candidates])]
        kept = candidates[torch.isin(candidates, kept)]
        if depth == 0:
            scored.append(torch.searchsorted(context, kept))
            continue
        wanted = round(len(candidates) * max(cod_ratio**depth, cod_floor))
        wanted = wanted if max_anchors is None else min(wanted, max_anchors)
        kept = kept[torch.randperm(len(kept), generator=generator)[:wanted].sort().values]
        scored.append(sum(map(len, anchors)) + torch.arange(len(kept)))
        anchors.append(kept)
        depths.append(torch.full_like(kept, depth))
    return torch.cat(anchors), torch.cat(depths), torch.cat(scored)


def packed_row(blocks: list[dict]) -> dict:
    """Packed blocks (columns `input_ids` and `seq_lengths`) to one flattened row without padding.

    The keys beside those below are the varlen arguments of flash attention, `cu_seq_lens_q/k` and `max_length_q/k`;
    attention kernels that do not read them isolate the documents by the restart of `position_ids`.

    | key | shape |
    |---|---|
    | `input_ids`, `position_ids`, `document_ids` | `(1, tokens)` |
    """
    lengths = torch.tensor([length for block in blocks for length in block["seq_lengths"]])
    input_ids = torch.cat([torch.as_tensor(block["input_ids"]) for block in blocks]).long()
    document_ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    ends = lengths.cumsum(0)
    boundaries = torch.nn.functional.pad(ends, (1, 0)).int()
    longest = int(lengths.max())
    return {
        "input_ids": input_ids[None],
        "position_ids": (torch.arange(len(input_ids)) - (ends - lengths)[document_ids])[None],
        "document_ids": document_ids[None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
    }


@dataclass
class PackingCollator:
    """Packed blocks (columns `input_ids`, `loss_mask`, `seq_lengths`) to one flattened row without padding.

    The keys of the result are those of [`packed_row`] and

    | key | shape | |
    |---|---|---|
    | `anchor`, `depth` | `(slots,)` | see [`sample_slots`] |
    | `labels` | `(1, slots)` | the token that a slot predicts, -100 where it carries no loss |
    | `features`, `last_hidden` | `(1, tokens, ...)` | where the blocks have them, see [`data.feature_shards`] |
    """

    num_depths: int
    cod_ratio: float
    cod_floor: float
    max_anchors: int | None = None
    first_slot: bool = False
    epoch: int = 0

    def __call__(self, blocks: list[dict]) -> dict:
        row = packed_row(blocks)
        input_ids, document_ids = row["input_ids"][0], row["document_ids"][0]
        loss_mask = torch.cat([torch.as_tensor(block["loss_mask"]) for block in blocks]).bool()
        # The sample depends on the blocks and the epoch alone, so that a resumed run draws it again.
        seed = hash((self.epoch, *input_ids.tolist())) % 2**63
        anchor, depth, scored = sample_slots(
            loss_mask,
            document_ids,
            self.num_depths,
            self.cod_ratio,
            self.cod_floor,
            self.max_anchors,
            torch.Generator().manual_seed(seed),
            self.first_slot,
        )
        labels = torch.full_like(anchor, -100)
        labels[scored] = input_ids[(anchor + 2 + depth)[scored]]
        row |= {"anchor": anchor, "depth": depth, "labels": labels[None]}
        for name in ("features", "last_hidden") if "features" in blocks[0] else ():
            row[name] = torch.cat([block[name] for block in blocks])[None]
        return row
