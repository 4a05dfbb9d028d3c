"""`[workload]`: who asks for what, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from minedraft.config_base import Seconds, Table, building, shorthand, with_kind
from minedraft.config_messages import FieldError


class AtOnceTable(Table):
    """All requests arrive at one moment."""

    kind: Literal["at-once"] = "at-once"
    at_s: Seconds = 0.0
    max_concurrency: ClassVar[int | None] = None

    def build(self) -> Any:
        """The arrival process."""
        from minedraft.sim.workload import AtOnce

        return AtOnce(self.at_s)


class PoissonTable(Table):
    """Memoryless arrivals, `rate` requests per second."""

    kind: Literal["poisson"]
    rate: float
    max_concurrency: ClassVar[int | None] = None

    def build(self) -> Any:
        """The arrival process."""
        from minedraft.sim.workload import Poisson

        return Poisson(self.rate)


class GammaTable(Table):
    """Bursty (cv > 1) or regular (cv < 1) arrivals, `rate` requests per second."""

    kind: Literal["gamma"]
    rate: float
    cv: float
    max_concurrency: ClassVar[int | None] = None

    def build(self) -> Any:
        """The arrival process."""
        from minedraft.sim.workload import Gamma

        return Gamma(self.rate, self.cv)


class OnOffTable(Table):
    """Bursts of `on_s` seconds and silences of `off_s`, on average; `rate` requests per second in the long run."""

    kind: Literal["on-off"]
    rate: float
    on_s: Seconds
    off_s: Seconds
    max_concurrency: ClassVar[int | None] = None

    def build(self) -> Any:
        """The arrival process."""
        from minedraft.sim.on_off import OnOff

        return OnOff(self.rate, self.on_s, self.off_s)


class ClosedLoopTable(Table):
    """`concurrency` clients, each of which sends its next request when its last one has ended."""

    kind: Literal["closed-loop"]
    concurrency: int = Field(ge=1)

    @property
    def max_concurrency(self) -> int:
        """For `SimBackend`."""
        return self.concurrency

    def build(self) -> Any:
        """The arrival process."""
        from minedraft.sim.workload import AtOnce

        return AtOnce()


Arrivals = Annotated[
    AtOnceTable | PoissonTable | GammaTable | OnOffTable | ClosedLoopTable,
    Field(discriminator="kind"),
    shorthand("kind", (str,)),
    with_kind(None, concurrency="closed-loop", cv="gamma", on_s="on-off", off_s="on-off", at_s="at-once"),
]


class FixedLengthTable(Table):
    """Always the same length."""

    kind: Literal["fixed"] = "fixed"
    tokens: int

    def build(self) -> Any:
        """The length distribution."""
        from minedraft.sim.workload import FixedLength

        return FixedLength(self.tokens)


class LognormalLengthTable(Table):
    """See `minedraft.sim.workload.LognormalLength`."""

    kind: Literal["lognormal"]
    mean: float
    p50: float | None = None
    sigma: float | None = None
    min_tokens: int = 1
    max_tokens: int | None = None

    def build(self) -> Any:
        """The length distribution."""
        from minedraft.sim.workload import LognormalLength

        return LognormalLength(**self.arguments())


class EmpiricalLengthTable(Table):
    """Lengths observed in a column of a CSV file."""

    kind: Literal["empirical"]
    path: str
    column: str

    def build(self) -> Any:
        """The length distribution."""
        from minedraft.sim.workload import EmpiricalLength

        return EmpiricalLength.from_csv(self.path, self.column)


class PartTable(Table):
    """A part of a mixture: how often, relative to the others, and how long."""

    weight: float
    length: Length


class MixtureLengthTable(Table):
    """Several kinds of requests, see `minedraft.sim.mixed_lengths.MixtureLength`."""

    kind: Literal["mixture"]
    parts: Annotated[tuple[PartTable, ...], Field(strict=False)]

    def build(self) -> Any:
        """The length distribution."""
        from minedraft.sim.mixed_lengths import MixtureLength

        parts = []
        for i, part in enumerate(self.parts):
            try:
                parts.append((part.weight, part.length.build()))
            except ValueError as error:
                raise ValueError(f"parts[{i}] is unusable: {error}") from error
        return MixtureLength(tuple(parts))


Length = Annotated[
    FixedLengthTable | LognormalLengthTable | EmpiricalLengthTable | MixtureLengthTable,
    Field(discriminator="kind"),
    shorthand("tokens", (int,), kind="fixed"),
    with_kind(None, tokens="fixed", mean="lognormal", column="empirical", parts="mixture"),
]
PartTable.model_rebuild()


class AbortsTable(Table):
    """Clients that leave early, see `minedraft.sim.workload.Aborts`."""

    probability: float
    mean_patience_s: Seconds


class SyntheticWorkloadTable(Table):
    """See `minedraft.sim.workload.SyntheticWorkload`."""

    kind: Literal["synthetic"] = "synthetic"
    num_requests: int = Field(default=200, ge=1)
    arrivals: Arrivals = AtOnceTable()
    prompt_lens: Length = FixedLengthTable(tokens=64)
    output_lens: Length = FixedLengthTable(tokens=256)
    max_tokens: int | None = None
    max_draft_tokens: int | None = None
    aborts: AbortsTable | None = None

    @property
    def max_concurrency(self) -> int | None:
        """For `SimBackend`."""
        return self.arrivals.max_concurrency

    @property
    def longest_request(self) -> int | None:
        """Tokens of every request, if all are alike."""
        if not isinstance(self.prompt_lens, FixedLengthTable) or not isinstance(self.output_lens, FixedLengthTable):
            return None
        return self.prompt_lens.tokens + min(self.output_lens.tokens, self.max_tokens or self.output_lens.tokens)

    def build(self, seed: int) -> Any:
        """The workload."""
        from minedraft.sim.workload import Aborts, SyntheticWorkload

        with building("workload.arrivals"):
            arrivals = self.arrivals.build()
        with building("workload.prompt_lens"):
            prompt_lens = self.prompt_lens.build()
        with building("workload.output_lens"):
            output_lens = self.output_lens.build()
        with building("workload.aborts"):
            aborts = None if self.aborts is None else Aborts(**self.aborts.arguments())
        return SyntheticWorkload(
            arrivals,
            prompt_lens,
            output_lens,
            self.num_requests,
            seed=seed,
            max_tokens=self.max_tokens,
            max_draft_tokens=self.max_draft_tokens,
            aborts=aborts,
        )


class NamedWorkloadTable(Table):
    """Traffic with published statistics, see `minedraft.sim.workload.NAMED_WORKLOADS`."""

    kind: Literal["azure-conv-like", "azure-code-like"]
    num_requests: int = Field(default=1000, ge=1)
    rate: float | None = None
    max_tokens: int | None = None
    max_concurrency: ClassVar[int | None] = None
    longest_request: ClassVar[int | None] = None

    def build(self, seed: int) -> Any:
        """The workload."""
        from minedraft.sim.workload import NAMED_WORKLOADS

        given = {name: getattr(self, name) for name in ("rate", "max_tokens") if getattr(self, name) is not None}
        return NAMED_WORKLOADS[self.kind](self.num_requests, seed=seed, **given)


class TraceWorkloadTable(Table):
    """A recorded trace, see `minedraft.sim.traces`. Without a `format` it is told from the file."""

    kind: Literal["trace"] = "trace"
    path: str
    format: Literal["azure", "mooncake", "sharegpt", "jsonl"] | None = None
    num_requests: int | None = Field(default=None, ge=1)
    time_scale: float = 1.0
    max_prompt_len: int | None = None
    max_output_len: int | None = None
    max_tokens: int | None = None
    arrivals: Arrivals | None = None
    longest_request: ClassVar[int | None] = None

    @property
    def max_concurrency(self) -> int | None:
        """For `SimBackend`."""
        return None if self.arrivals is None else self.arrivals.max_concurrency

    def build(self, seed: int) -> Any:
        """The workload."""
        from minedraft.sim.traces import Trace, TraceOptions

        if not Path(self.path).is_file():
            raise FieldError("workload.path", f"no file {self.path!r}; check the path")
        with building("workload.arrivals"):
            arrivals = None if self.arrivals is None else self.arrivals.build()
        options = TraceOptions(
            max_requests=self.num_requests,
            time_scale=self.time_scale,
            max_prompt_len=self.max_prompt_len,
            max_output_len=self.max_output_len,
            max_tokens=self.max_tokens,
            arrivals=arrivals,
            seed=seed,
        )
        return Trace(self.path, self.format or guess_trace_format(Path(self.path)), options)


_MOST_OF_A_LINE: Final = 1 << 20  # of a file that has no lines


def guess_trace_format(path: Path) -> str:
    """The trace format that a file seems to have, by its ending and, for JSON lines, its first line.

    Raises:
        FieldError: it has none of the known endings, and does not begin like JSON lines.
    """
    if path.suffix == ".csv":
        return "azure"
    if path.suffix == ".json":
        return "sharegpt"
    with path.open("rb") as file:
        first = file.readline(_MOST_OF_A_LINE)
    if path.suffix != ".jsonl" and not first.lstrip().startswith(b"{"):
        raise FieldError(
            "workload.format",
            f"is missing, and {str(path)!r} is no trace by its name: known are .csv (Azure), .json (ShareGPT) and "
            ".jsonl (Mooncake or plain); check the path, or say which format it has",
        )
    return "mooncake" if b'"input_length"' in first else "jsonl"


Workload = Annotated[
    SyntheticWorkloadTable | NamedWorkloadTable | TraceWorkloadTable,
    Field(discriminator="kind"),
    with_kind("synthetic", path="trace"),
]

NAMED_WORKLOAD_KINDS: Final = ("synthetic", "azure-conv-like", "azure-code-like")
