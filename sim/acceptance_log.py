"""Acceptance logs: what became of each drafted position of recorded requests.

A log is a file of JSON lines, one per request, in either of two forms, which here say the same:

    {"num_draft": 4, "num_accepted": [4, 2, 0, 1]}
    {"outcomes": "?1111?110010"}

* `num_accepted`: accepted drafts of each round, in order; `num_draft`: drafts verified in each, a list, or one number
  for all. A round yields one token more than it accepted. Rounds of 0 drafts are allowed (one token without drafting).
  The first round drafts output position `start`, 1 if left out, since the prompt's own step yields position 0.
* `outcomes`: a character per output position: 1 where the draft was right, 0 where it was refused, ? where nobody
  knows, because that token was not drafted (the bonus token of a round, a plain step).

Both may have a `request_id`, which `by_id` needs. A journal that minedraft recorded, in whatever world, is a log too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from minedraft.journal import FORMAT, read_journal
from minedraft.json_text import parse_json
from minedraft.request import RequestId
from minedraft.work import RequestAborted, RequestArrived, VerifyResult, VerifyWork, WorkDone, WorkFailed

WRONG: Final = 0
RIGHT: Final = 1
UNKNOWN: Final = 2
_CHARACTERS: Final = {"0": WRONG, "1": RIGHT, "?": UNKNOWN}


class AcceptanceLogError(ValueError):
    """A log can't be used: one line with file, line number, fault and remedy."""


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A recorded request.

    Attributes:
        request_id: its id then, if the log has it.
        outcomes: WRONG, RIGHT or UNKNOWN per output position; at least one is known.
    """

    request_id: RequestId | None
    outcomes: bytes

    @property
    def rate(self) -> float:
        """Share of the known positions where the draft was right."""
        right = self.outcomes.count(RIGHT)
        return right / (right + self.outcomes.count(WRONG))

    def __post_init__(self) -> None:
        if RIGHT not in self.outcomes and WRONG not in self.outcomes:
            raise ValueError("no position's outcome is known; leave the request out")


def read_acceptance_log(path: str | Path) -> list[LoggedRequest]:
    """Read a log, or a journal; of the latter's requests those of which at least one draft was verified.

    Raises:
        AcceptanceLogError: the file is no log, or has no request.
        JournalError: it is a broken journal.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
            is_journal = f'"{FORMAT}"' in first
            requests = _of_journal(path) if is_journal else list(_of_lines(path, (first, *file)))
    except OSError as error:
        raise AcceptanceLogError(f"{path}: {error.strerror}; check the path of the log") from error
    except UnicodeDecodeError as error:
        raise AcceptanceLogError(f"{path}: not text in UTF-8; give a file of JSON lines, or a journal") from error
    if not requests:
        remedy = "record one of a run with drafts" if is_journal else "write one JSON object per request"
        raise AcceptanceLogError(f"{path}: no request in it has a verified draft; {remedy}")
    return requests


# --- lines


def _of_lines(path: Path, lines: Iterable[str]) -> Iterator[LoggedRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _of_line(line)
        except ValueError as error:
            raise AcceptanceLogError(f"{path}:{number}: {error}") from error


def _parsed(line: str) -> dict[str, Any]:
    try:
        found = parse_json(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}; write one object per line") from error
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}, must be an object such as {{'num_draft': 4, 'num_accepted': [2]}}")
    return found


def _of_line(line: str) -> LoggedRequest:
    fields = _parsed(line)
    request_id = fields.pop("request_id", None)
    if request_id is not None and not isinstance(request_id, str):
        raise ValueError(f"request_id is {request_id!r}, must be text")
    given = fields.keys()
    if given == {"outcomes"}:
        return LoggedRequest(request_id, _of_characters(fields["outcomes"]))
    if given - {"start"} == {"num_draft", "num_accepted"}:
        start = _count(fields.get("start", 1), "start")
        return LoggedRequest(request_id, _of_rounds(fields["num_draft"], fields["num_accepted"], start))
    raise ValueError(_wrong_fields(given))


def _wrong_fields(given: Iterable[str]) -> str:
    known = ("num_draft", "num_accepted", "start", "outcomes", "request_id")
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            return f"unknown field {name!r}; {hint}"
    return "give num_draft and num_accepted, or outcomes alone"


def _of_characters(text: Any) -> bytes:
    if not isinstance(text, str) or not text:
        raise ValueError(f"outcomes is {text!r}, must be text of the characters 1, 0 and ?")
    strange = next((character for character in text if character not in _CHARACTERS), None)
    if strange is not None:
        raise ValueError(f"outcomes[{text.index(strange)}] is {strange!r}, must be 1 (right), 0 (wrong) or ? (unknown)")
    return bytes([_CHARACTERS[character] for character in text])


def _of_rounds(num_draft: Any, num_accepted: Any, start: int) -> bytes:
    if not isinstance(num_accepted, list):
        raise ValueError(f"num_accepted is {num_accepted!r}, must be a list with one number per round")
    drafts = num_draft if isinstance(num_draft, list) else [num_draft] * len(num_accepted)
    if len(drafts) != len(num_accepted):
        raise ValueError(f"num_draft has {len(drafts)} rounds, num_accepted {len(num_accepted)}; give one per round")
    outcomes = bytearray([UNKNOWN]) * start
    for i, (drafted, accepted) in enumerate(zip(drafts, num_accepted, strict=True)):
        k, right = _count(drafted, f"num_draft[{i}]"), _count(accepted, f"num_accepted[{i}]")
        if right > k:
            raise ValueError(f"num_accepted[{i}] is {right}, above the {k} drafts of its round")
        outcomes += bytes([RIGHT] * right + [WRONG if right < k else UNKNOWN])
    return bytes(outcomes)


def _count(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}, must be a whole number >= 0")
    return value


# --- journals


class _Recorded:
    """A request of a journal, while it is read."""

    def __init__(self, request_id: RequestId, prompt_len: int) -> None:
        self.request_id = request_id
        self.prompt_len = prompt_len
        self.outcomes = bytearray()

    def note(self, position: int, outcome: int) -> None:
        """Say what became of a position; a later word on the same one counts."""
        self.outcomes.extend([UNKNOWN] * (position + 1 - len(self.outcomes)))
        self.outcomes[position] = outcome


def _of_journal(path: Path) -> list[LoggedRequest]:
    everybody: list[_Recorded] = []
    alive: dict[RequestId, _Recorded] = {}
    verifying: dict[int, tuple[VerifyWork, list[_Recorded | None]]] = {}
    for _, item in read_journal(path):
        if isinstance(item, RequestArrived):
            recorded = _Recorded(item.request.request_id, item.request.prompt_len)
            alive[recorded.request_id] = recorded
            everybody.append(recorded)
        elif isinstance(item, RequestAborted):
            alive.pop(item.request_id, None)  # what is in flight for it says nothing
        elif isinstance(item, VerifyWork):
            verifying[item.work_id] = (item, [alive.get(request_id) for request_id in item.request_ids])
        elif isinstance(item, WorkFailed):
            verifying.pop(item.work_id, None)
        elif isinstance(item, WorkDone) and isinstance(item.result, VerifyResult):
            work, requests = verifying.pop(item.work_id)
            _note_round(work, item.result, [_if_alive(one, alive) for one in requests])
    known = [one for one in everybody if RIGHT in one.outcomes or WRONG in one.outcomes]
    return [LoggedRequest(one.request_id, bytes(one.outcomes)) for one in known]


def _if_alive(recorded: _Recorded | None, alive: Mapping[RequestId, _Recorded]) -> _Recorded | None:
    """None for a request that was aborted, also if its id is in use again."""
    return recorded if recorded is not None and alive.get(recorded.request_id) is recorded else None


def _note_round(work: VerifyWork, result: VerifyResult, requests: Sequence[_Recorded | None]) -> None:
    """Note what a verification says of the positions that it judged."""
    for i, recorded in enumerate(requests):
        if recorded is None or not work.num_draft[i]:
            continue
        position = work.num_computed[i] + work.num_new[i] - recorded.prompt_len
        accepted, committed = result.num_accepted[i], result.num_committed[i]
        for slot in range(min(accepted, committed)):
            recorded.note(position + slot, RIGHT)
        # Where the text ends before the refused draft, a world may report fewer as accepted than were right.
        if accepted < work.num_draft[i] and committed > accepted:
            recorded.note(position + accepted, WRONG)
