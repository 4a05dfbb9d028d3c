"""Where a text ends, and what the parent keeps of it."""

from __future__ import annotations

import pytest

from minedraft.backends.torch.request import TorchRequest
from minedraft.backends.torch.transcript import PendingDraft, Transcript, cut_at_stop
from minedraft.request import FinishReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = (2, 3)


@pytest.mark.parametrize(
    ("token_ids", "num_output", "fields", "kept", "reason"),
    [
        ([7, 8, 9], 0, {}, 3, None),
        ([7, 2, 9], 0, {}, 2, STOP),  # inside an accepted block
        ([7, 8, 3], 0, {}, 3, STOP),  # the target's own token; the second of two EOS
        ([2], 0, {}, 1, STOP),
        ([7, 2, 9], 0, {"ignore_eos": True}, 3, None),
        ([7, 9, 2], 0, {"stop_token_ids": (9,)}, 2, STOP),
        ([7, 9, 8], 0, {"stop_token_ids": (9,), "ignore_eos": True}, 2, STOP),
        ([7, 8, 9], 8, {}, 2, LENGTH),
        ([7, 8, 9], 7, {}, 3, LENGTH),
        ([7, 8, 2], 7, {}, 3, STOP),  # both on one token: stop wins
        ([7, 8, 9, 2], 7, {}, 3, LENGTH),  # EOS beyond the limit is never seen
        ([7, 2, 9, 9], 7, {}, 2, STOP),
        ([7, 8], 0, {"max_tokens": 1}, 1, LENGTH),
    ],
)
def test_stop_boundaries(
    token_ids: list[int], num_output: int, fields: dict[str, object], kept: int, reason: FinishReason | None
) -> None:
    """I5: nothing is committed after the first stop boundary."""
    request = TorchRequest("r", (5,), **({"max_tokens": 10} | fields))  # type: ignore[arg-type]
    assert cut_at_stop(token_ids, num_output, request, EOS) == (tuple(token_ids[:kept]), reason)


def test_commit_grows_the_output_and_ends_it() -> None:
    transcript = Transcript(TorchRequest("r", (5, 6), 4))
    assert transcript.commit([7, 8], EOS) == (2, None)
    assert transcript.tokens(1, 3) == (6, 7, 8)
    assert transcript.commit([2, 9], EOS) == (1, STOP)
    assert transcript.output_token_ids == (7, 8, 2)
    assert transcript.finish_reason is STOP
    with pytest.raises(ValueError, match="only 5 are committed"):
        transcript.tokens(3, 3)


def test_rewind_forgets_a_voided_round() -> None:
    transcript = Transcript(TorchRequest("r", (5, 6), 4))
    transcript.commit([7, 2], EOS)
    transcript.rewind(3)
    assert transcript.output_token_ids == (7,)
    assert transcript.finish_reason is None


def test_a_draft_is_used_at_most_once_and_by_its_own_key() -> None:
    """I4."""
    transcript = Transcript(TorchRequest("r", (5, 6), 4))
    transcript.put_draft(PendingDraft(1, 4, (7, 8, 9), None))
    assert transcript.take_draft(1, 4, 2).token_ids == (7, 8)
    with pytest.raises(ValueError, match="none such"):
        transcript.take_draft(1, 4, 1)
    for incarnation, round_number, count in ((2, 4, 1), (1, 5, 1), (1, 4, 4)):
        transcript.put_draft(PendingDraft(1, 4, (7, 8, 9), None))
        with pytest.raises(ValueError, match="none such"):
            transcript.take_draft(incarnation, round_number, count)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt_token_ids": ()}, "prompt_len"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"arrival_s": -1.0}, "arrival_s"),
        ({"max_draft_tokens": -1}, "max_draft_tokens"),
    ],
)
def test_a_bad_request_names_its_field(fields: dict[str, object], name: str) -> None:
    good: dict[str, object] = {"prompt_token_ids": (5,), "max_tokens": 3}
    with pytest.raises(ValueError, match=f"^request 'r': {name} is ") as caught:
        TorchRequest("r", **(good | fields))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_request_without_a_seed_has_one_of_its_own() -> None:
    one, two = (TorchRequest(name, (5,), 1, temperature=1.0).sampling() for name in "ab")
    assert one.seed != two.seed
    assert one == TorchRequest("a", (5,), 1, temperature=1.0).sampling()
    assert TorchRequest("a", (5,), 1, seed=7).sampling().seed == 7
