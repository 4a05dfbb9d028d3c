"""PEARL, worlds where a request's next tokens are drafted while its last draft is verified: `pearl`, `pearl-minedraft`.

**The published rule** (`PearlBackend`; Liu et al., ICLR 2025, arXiv 2408.11850, and the authors' public
code: `parallel_speculative_decoding` in smart-lty/ParallelSpeculativeDecoding, the same per request of a batch in
nano-PEARL). In every step the drafter drafts k tokens while the target makes one pass, and the step ends when both are
done:

* *pre-verify* (at first, and after a rejection): the target has no drafts to judge; its pass says what follows the
  text. If that is the first of the k tokens that are being drafted, the other k - 1 stand, and the next step is
  post-verify; else all are thrown away. One token is committed in either case.
* *post-verify*: the target judges the k - 1 tokens that stand, and behind them the first of the k new ones, for which
  the drafter went on as if all were right. With n of these k right, min(n + 1, k) tokens are committed: if n = k there
  is **no bonus token**, since the pass that would give one judges the first new draft, and the other k - 1 new ones
  stand; if n < k the target's correction is committed, and the next step is pre-verify.

To the core that is a sequence of lawful rounds of one batch: post-verify is the verification of k - 1 drafts, with the
token behind them counted as the target's own (`accepted + 1`) whether the drafter had guessed it or not, and
pre-verify one of k = 0. So a draft work is answered at once with what stands, it returns fewer drafts than asked for,
and its *order* is carried out beside the verification that follows; it waits only while the drafting before it goes
on. With constant stage times a step lasts max(V, t) + o, and the tokens per step are those of
`minedraft.theory.pearl`.

**The variant** that the plugin of arXiv 2603.18016 runs as its PEARL baseline (`MineDraftPearlBackend`;
electron-shaders/MineDraft, `spec_decode_worker.py`, option `force_pearl`) keeps the bonus token and so is off by one:
a draft that goes on from the drafts in verification, or from the bare text, predicts the token that the target's pass
then commits itself, but it is verified *behind* that token, without a shift. Whether drafts are kept is asked of the
batch, not of the request: if anybody's agreed, everybody's are verified, stale ones too. A draft in the wrong place is
right only by accident, and here never, so every step commits one token per request: autoregressive decoding at max(V,
t) + o per step, with useless drafts to verify in about every second one. (The real one gets a little more, by such
accidents.)

What is simplified: a step's tokens are reported when the target is done, not when the drafter is too; each drafting's
tokens have the acceptance model's rates from slot 0 on, as a round of sequential decoding has; the drafting of the
last step of a busy period is not in the figures, since nobody asks for it. The draft length adapts by policy
(`draft_length`); the original sets it to the ratio of the two speeds.

**KV.** The core reserves as it does in sequential decoding: k - 1 target slots for the drafts in verification (the
plugin reserves 2k - 1), and draft KV for the text and k drafts, while this drafter may be up to k - 1 tokens further.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from minedraft.request import FinishReason, RequestId
from minedraft.sim.backend import SimBackend, _Job, priced
from minedraft.work import DraftResult, DraftWork, VerifyResult, VerifyWork, Work, WorkDone, WorkFailed


class Standing(NamedTuple):
    """What one drafting left for a request's next verification.

    Attributes:
        agrees: the drafter was right as far as it can be told by now.
        num_drafted: tokens that were drafted.
        num_left: of those, the last ones that may be verified.
        num_good: of those left, the first ones that are right.
        incarnation: the stay in which they were drafted.
        num_tokens: committed tokens, prompt included, that they are to be verified behind.
    """

    agrees: bool
    num_drafted: int
    num_left: int
    num_good: int
    incarnation: int = -1
    num_tokens: int = -1


class PearlBackend(SimBackend):
    """A simulated world in which drafting goes on beside the verification of the same requests; see the module.

    Meant for one batch: a core in mode `sd`, with `SchedulerConfig.draft_ingests_beside = False`, since this drafter
    drafts beside the target's work.

    Arguments are those of `SimBackend`. The drafting beside a verification is priced, and sent, as the draft work that
    was answered before it, and judged once, as a whole, in the positions that it drafts for.

    Raises:
        ValueError: `colocated` is set: PEARL needs a drafter on a device of its own.
    """

    def _prepare(self) -> None:
        if self.drafter is self.target:
            raise ValueError("colocated is True, but PEARL drafts during verification; give the drafter its own device")
        self._asked: DraftWork | None = None  # waits for the drafting that goes on
        self._order: DraftWork | None = None  # answered; carried out beside the next verification
        self._drafting: _Job | None = None
        self._span_s: tuple[float, float] | None = None  # of the last drafting, if nobody has been told of it
        # Of the drafting that belongs to the last verification: whose, in which incarnation, how many tokens.
        self._ordered: dict[RequestId, tuple[int, int]] = {}
        self._standing: dict[RequestId, Standing] = {}
        self._handed: dict[RequestId, int] = {}  # right ones among the drafts of the last answer

    def submit(self, work: Work) -> None:
        """See `Backend`."""
        super().submit(work)
        if type(work) is VerifyWork:
            self._carry_out_order()

    # --- drafting

    def _submit_draft(self, work: DraftWork) -> None:
        if not self._drafter_up:
            super()._submit_draft(work)
            return
        if self._num_in_flight > 1:
            raise ValueError("a draft work came during a verification: set draft_ingests_beside = False for PEARL")
        self._asked = work
        if self._drafting is None:
            self._answer()

    def _answer(self) -> None:
        """Give the core what stands, and take its order."""
        work, self._asked = self._asked, None
        assert work is not None
        standing, self._standing = self._standing, {}
        span_s, self._span_s = self._span_s or (self.env.now, self.env.now), None
        self._num_in_flight -= 1
        self._handed = {}
        if self._draft_fails is not None and next(self._draft_fails):
            self._events.append(WorkFailed(work.work_id, "injected draft failure"))
            return
        self._order = work
        for request_id, incarnation in work.freed:
            if request_id in standing and standing[request_id].incarnation == incarnation:
                del standing[request_id]
        if not any(left.agrees for left in standing.values()):
            standing = {}
        result = self._hand_out(work, standing)
        self._events.append(WorkDone(work.work_id, result, *span_s))

    def _hand_out(self, work: DraftWork, standing: Mapping[RequestId, Standing]) -> DraftResult:
        num_drafted: list[int] = []
        probs: list[tuple[float, ...]] = []
        columns = zip(work.request_ids, work.incarnations, work.num_computed, work.num_new, work.num_draft, strict=True)
        for request_id, incarnation, computed, new, wanted in columns:
            left = standing.get(request_id)
            count = 0
            rates: tuple[float, ...] = ()
            if left is not None and (left.incarnation, left.num_tokens) == (incarnation, computed + new):
                count = min(wanted, left.num_left)
                self._handed[request_id] = left.num_good
                if self._draft_probs and count:
                    first = left.num_drafted - left.num_left
                    rates = self._acceptance.conditional_rates(request_id, left.num_drafted)[first : first + count]
            num_drafted.append(count)
            probs.append(rates)
        return DraftResult(tuple(num_drafted), tuple(probs) if self._draft_probs else None)

    def _carry_out_order(self) -> None:
        """Draft beside the verification that was just submitted, from when it starts."""
        order, self._order = self._order, None
        self._ordered = {}
        if order is None:
            return
        num_made = order.num_draft if self._num_drafted is None else self._num_drafted(order)
        columns = zip(order.request_ids, order.incarnations, num_made, strict=True)
        self._ordered = {request_id: (incarnation, made) for request_id, incarnation, made in columns if made}
        job = self._drafting = self._drafts[order.work_id] = _Job(
            order, priced(self._cost.draft_s(order), order), self._draft_ended
        )
        if self.host.busy and self.drafter is not self.host:
            self._through_host(job, 0.0)
        else:
            self._start_draft(job)

    def _draft_done(self, job: _Job) -> None:
        """A drafting is over, and what it made is where it is verified."""
        self._drafts.clear()
        self._drafting = None
        self._span_s = job.started_s, job.ended_s
        if self._asked is not None:
            self._answer()

    def _lose_drafter(self) -> None:
        if self._drafting is not None:
            self.drafter.cancel(self._drafting)
            self._drafts.clear()  # the base class counts what it finds there as works in flight
        if self._asked is not None:
            self._num_in_flight -= 1
        self._drafting = self._asked = self._order = self._span_s = None
        self._ordered, self._standing = {}, {}
        super()._lose_drafter()

    # --- verification

    def _plain_result(self, work: VerifyWork, num_arrived: int) -> VerifyResult:
        """A step without drafts may leave some standing, so it has no short cut here."""
        return self._draft_result(work, num_arrived)

    def _draft_result(self, work: VerifyWork, num_arrived: int) -> VerifyResult:
        num_accepted: list[int] = []
        num_committed: list[int] = []
        reasons: dict[int, FinishReason | None] = {}
        self._standing = {}
        planned = zip(work.request_ids, work.incarnations, work.num_computed, work.num_new, work.num_draft, strict=True)
        columns = zip(planned, work.is_last, strict=True)
        for i, ((request_id, incarnation, computed, new, k), is_last) in enumerate(columns):
            accepted, committed = 0, int(is_last)
            truth = self._truths.get(request_id)
            # As in the base class: the entry may be somebody's who was aborted, and the id in use again.
            if is_last and truth is not None and truth.arrival_index < num_arrived:
                position = computed + new - truth.prompt_len
                if k:
                    accepted = min(k, self._handed[request_id])
                    committed = accepted + 1
                if committed >= truth.num_output - position:
                    committed = truth.num_output - position
                    reasons[i] = self._finish(request_id)
                elif request_id in self._ordered and self._ordered[request_id][0] == incarnation:
                    left = self._left_of(request_id, position, k, accepted, self._ordered[request_id][1])
                    if left is not None:
                        self._standing[request_id] = left._replace(
                            incarnation=incarnation, num_tokens=computed + new + committed
                        )
            num_accepted.append(accepted)
            num_committed.append(committed)
        finish_reasons = None
        if any(reasons.values()):
            finish_reasons = tuple([reasons.get(i) for i in range(len(num_accepted))])
        return VerifyResult(tuple(num_accepted), tuple(num_committed), finish_reasons)

    def _left_of(self, request_id: RequestId, position: int, k: int, accepted: int, drafted: int) -> Standing | None:
        """What the drafting beside a verification leaves for the next one.

        Args:
            request_id: whose.
            position: output tokens before the verification.
            k: drafts verified, behind which `drafted` more were drafted.
            accepted: of the k.
            drafted: tokens drafted meanwhile, at least 1.

        Returns:
            None if it was for nothing.
        """
        if accepted < k:
            return None
        # Their first is for the place of the target's own token; it agrees with that if it would have been accepted.
        right = self._acceptance.num_accepted(request_id, position + k, drafted)
        return Standing(True, drafted, drafted - 1, right - 1) if right else None


class MineDraftPearlBackend(PearlBackend):
    """The PEARL baseline of the authors' plugin, off by one; see the module."""

    def _left_of(self, request_id: RequestId, position: int, k: int, accepted: int, drafted: int) -> Standing | None:
        """All of them, in the wrong place, whether they agree or not."""
        agrees = accepted == k if k else self._acceptance.num_accepted(request_id, position, drafted) > 0
        return Standing(agrees, drafted, drafted, 0)
