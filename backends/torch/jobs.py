"""What a worker does with a job: `draft` and `verify`."""

from __future__ import annotations

import torch

from minedraft.backends.torch.language_model import LanguageModel, Row
from minedraft.backends.torch.messages import Drafted, DraftEntry, DraftJob, VerifyJob
from minedraft.backends.torch.sampling import Acceptance, DraftToken, draft_token
from minedraft.backends.torch.sampling import verify as verify_drafts


def draft(model: LanguageModel, job: DraftJob, acceptance: Acceptance) -> tuple[Drafted, ...]:
    """Catch up with the committed tokens, then draft token by token; each pass holds all entries that want more."""
    model.drop(job.freed)
    drafts: list[list[DraftToken]] = [[] for _ in job.entries]
    pending = [index for index, entry in enumerate(job.entries) if entry.token_ids]
    while pending:
        rows = [_next_row(job.entries[index], drafts[index]) for index in pending]
        for index, logits in zip(pending, model.forward(rows), strict=True):
            entry = job.entries[index]
            if entry.num_draft:
                position = entry.num_computed + len(entry.token_ids) + len(drafts[index])
                drafts[index].append(draft_token(logits[-1], entry.sampling, position, acceptance))
        pending = [index for index in pending if len(drafts[index]) < job.entries[index].num_draft]
    return tuple(_drafted(tokens) for tokens in drafts)


def _next_row(entry: DraftEntry, drafted: list[DraftToken]) -> Row:
    if not drafted:
        return Row(entry.key, entry.num_computed, entry.token_ids, min(entry.num_draft, 1))
    done = entry.num_computed + len(entry.token_ids) + len(drafted) - 1
    return Row(entry.key, done, (drafted[-1].token_id,), 1)


def _drafted(tokens: list[DraftToken]) -> Drafted:
    rows = [token.row for token in tokens if token.row is not None]
    return Drafted(
        token_ids=tuple(token.token_id for token in tokens),
        probs=tuple(token.prob for token in tokens),
        rows=torch.stack(rows).cpu().numpy() if rows else None,
    )


def verify(model: LanguageModel, job: VerifyJob, acceptance: Acceptance) -> tuple[tuple[int, ...], ...]:
    """One forward over all entries; accepted drafts and the target's own token for those that reach the last one."""
    model.drop(job.freed)
    rows = [
        Row(
            entry.key,
            entry.num_computed,
            entry.token_ids + entry.draft_ids,
            1 + len(entry.draft_ids) if entry.is_last else 0,
        )
        for entry in job.entries
    ]
    tokens: list[tuple[int, ...]] = []
    for entry, logits in zip(job.entries, model.forward(rows), strict=True):
        if not entry.is_last:
            tokens.append(())
            continue
        draft_rows = None if entry.draft_rows is None else torch.from_numpy(entry.draft_rows)
        position = entry.num_computed + len(entry.token_ids)
        tokens.append(tuple(verify_drafts(logits, entry.draft_ids, draft_rows, entry.sampling, position, acceptance)))
    return tuple(tokens)
