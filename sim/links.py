"""Links between target and drafter: how long a message takes (`Link`, `Lane`), and what is sent (`Traffic`).

A link has two lanes, one per direction. A lane carries one message at a time, in the order in which they are sent; a
message holds it for its bytes over the bandwidth, and arrives a latency after that.

What travels, and when, depends on where the scheduler and the rejection sampling are:

* At the target, `payload = "token_ids"` (minedraft's own design). A drafter's work takes the ids of its new tokens with
  it when it is submitted, so a drafter can begin on a verified batch a link time after the verification ended. Its
  result takes the drafted ids back. Ids cost next to nothing: what counts is the latency, twice per draft, once the
  drafter is the slower one: two sub-batches have the period max(V, t + two link times) + o.
* The same with `payload = "draft_probs"`: the drafted ids bring the drafter's whole distributions with them, one fp32
  per entry of its vocabulary, which rejection sampling of *sampled* drafts needs.
* At the drafter, `payload = "target_probs"` (the MineDraft authors' plugin, arXiv 2603.18016). A verification takes its
  ids to the target, and sends back probabilities *and* log-probabilities, fp32, of every position: m (k + 1) |V| * 8
  bytes on the critical path of each round. Two sub-batches then have the period max(V + two link times, t) + o.

A head (EAGLE, MTP) reads the target's hidden states, 16 bits each, of every position that the target has computed:
prompts after their prefill, then in each round the accepted drafts and the token before them (with `target_probs` all
k + 1 positions, since the target doesn't know what will be accepted). They are sent when the verification has ended,
ahead of the next work for the drafter in the same lane, which therefore can't overtake them.

Left out: frames and acknowledgements, transfers between the devices of one group, other traffic on the same wires (in a
star every replica has lanes of its own), GPU time spent in copying, and states that a drafter which was lost would need
again.

Law of this file: arithmetic only; the world that owns the clock is `minedraft.sim.backend`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

from minedraft.sim.presets import find_preset, offer
from minedraft.work import DraftWork, VerifyResult, VerifyWork

Payload = Literal["token_ids", "draft_probs", "target_probs"]

ID_BYTES: Final = 4
PROB_BYTES: Final = 4
STATE_BYTES: Final = 2
SLOWEST_BYTES_PER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the target's group and the drafter's; the same in both directions.

    Attributes:
        latency_s: what a message takes however short it is, in seconds.
        peak_bytes_per_s: bandwidth of one direction by its standard; inf for none that matters.
        efficiency: share of it that large messages reach.
        source: where the figures come from.

    Raises:
        ValueError: a figure is out of range; the message names it.
    """

    latency_s: float
    peak_bytes_per_s: float
    efficiency: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        if not 0.0 <= self.latency_s < math.inf:
            raise ValueError(f"Link.latency_s is {self.latency_s}, must be a finite number of seconds >= 0")
        if not self.peak_bytes_per_s >= SLOWEST_BYTES_PER_S:
            raise ValueError(f"Link.peak_bytes_per_s is {self.peak_bytes_per_s}, must be >= {SLOWEST_BYTES_PER_S:g}")
        if not 0.0 < self.efficiency <= 1.0:
            raise ValueError(f"Link.efficiency is {self.efficiency}, must be in (0, 1]")

    @property
    def bytes_per_s(self) -> float:
        """What large messages reach, in one direction."""
        return self.peak_bytes_per_s * self.efficiency

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds until a message has arrived that finds its lane free."""
        return num_bytes / self.bytes_per_s + self.latency_s


def load_link(name: str) -> Link:
    """The link of that name in `data/links.toml`.

    Raises:
        ValueError: there is none; the message offers near matches.
    """
    return Link(**find_preset("links.toml", "link", name))


class Lane:
    """One direction of a link; see the module's docstring.

    Attributes:
        num_messages: sent so far.
        num_bytes: sent so far.
        busy_s: seconds that they hold the lane.
    """

    __slots__ = ("_bytes_per_s", "_free_at_s", "_latency_s", "busy_s", "num_bytes", "num_messages")

    def __init__(self, link: Link) -> None:
        self._latency_s = link.latency_s
        self._bytes_per_s = link.bytes_per_s
        self._free_at_s = -math.inf
        self.num_messages = 0
        self.num_bytes = 0.0
        self.busy_s = 0.0

    def send(self, now_s: float, num_bytes: float) -> float:
        """Send a message behind those that were sent before.

        Args:
            now_s: the time, in seconds; never less than at the last call.
            num_bytes: its length.

        Returns:
            Seconds from now until it has arrived.
        """
        duration_s = num_bytes / self._bytes_per_s
        start_s = self._free_at_s if self._free_at_s > now_s else now_s
        self._free_at_s = start_s + duration_s
        self.num_messages += 1
        self.num_bytes += num_bytes
        self.busy_s += duration_s
        return (start_s - now_s) + duration_s + self._latency_s


@dataclass(frozen=True, slots=True)
class Traffic:
    """What travels over which link.

    Attributes:
        link: the link.
        payload: see the module's docstring.
        vocab_size: of the target; counts with probabilities only.
        draft_vocab_size: of the drafter's output head; counts with "draft_probs" only, and 0 means the target's.
        state_size: numbers that a head reads per position of the target: its hidden size, three times that for EAGLE-3,
            0 for a drafter that reads tokens only.

    Raises:
        ValueError: a figure is out of range or missing; the message names it.
    """

    link: Link
    payload: Payload = "token_ids"
    vocab_size: int = 0
    draft_vocab_size: int = 0
    state_size: int = 0

    def __post_init__(self) -> None:
        if self.payload not in get_args(Payload):
            raise ValueError(f"payload is {self.payload!r}; {offer(self.payload, dict.fromkeys(get_args(Payload)))}")
        for name in ("vocab_size", "draft_vocab_size", "state_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be >= 0")
        if self.payload != "token_ids" and not self.vocab_size:
            raise ValueError(f'vocab_size is 0, but payload "{self.payload}" sends a number per entry; give it')

    @property
    def at_drafter(self) -> bool:
        """Whether the scheduler and the rejection sampling are at the drafter."""
        return self.payload == "target_probs"

    def draft_work_bytes(self, work: DraftWork) -> float:
        """Target to drafter, with a work: the ids of its new tokens."""
        return ID_BYTES * sum(work.num_new)

    def draft_bytes(self, work: DraftWork) -> float:
        """Drafter to target, when a draft is done: k ids per request, and their distributions."""
        each = ID_BYTES
        if self.payload == "draft_probs":
            each += PROB_BYTES * (self.draft_vocab_size or self.vocab_size)
        return each * sum(work.num_draft)

    def verify_work_bytes(self, work: VerifyWork) -> float:
        """Drafter to target, with a work, where the scheduler is at the drafter: the ids to compute."""
        return ID_BYTES * (sum(work.num_new) + sum(work.num_draft))

    def probs_bytes(self, work: VerifyWork) -> float:
        """Target to drafter, when a verification is done: probabilities and log-probabilities, and hidden states."""
        num_rows = sum(work.is_last) + sum(work.num_draft)
        num_positions = sum(work.num_new) + sum(work.num_draft)
        return 2 * PROB_BYTES * self.vocab_size * num_rows + STATE_BYTES * self.state_size * num_positions

    def states_bytes(self, work: VerifyWork, result: VerifyResult) -> float:
        """Target to drafter, when a verification is done: hidden states of all that is text now."""
        return STATE_BYTES * self.state_size * (sum(work.num_new) + sum(result.num_accepted))
