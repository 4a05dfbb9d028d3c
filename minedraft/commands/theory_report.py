"""The figures of `minedraft theory` as tables, and what they mean in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from minedraft.commands.demo import heading, paragraph
from minedraft.commands.report import console
from minedraft.commands.theory_setting import TheoryOptions, TheorySetting
from minedraft.theory import theorem
from minedraft.theory.claims import COUNTER_EXAMPLE, REDUCTIONS, SHOWN_X, Claims
from minedraft.theory.stages import reduction_of_gain
from minedraft.theory.study import ModeFigures, Study

if TYPE_CHECKING:
    from rich.table import Table

CVS: Final = (0.0, 0.05, 0.1, 0.2, 0.3)
MOST_REPLICAS: Final = 8
T_TOKENS: Final = 1000


def print_theory(setting: TheorySetting) -> None:
    """Print all of it on stdout."""
    study, out = setting.study, console()
    heading("1. One round")
    paragraph(_described(setting.options, study) + "\n")
    out.print(_modes_table(study))
    paragraph(f"\n{_gains(study)}\n")
    out.print(_best_table(study))
    paragraph(f"\n{_jitter(study)}")
    if setting.alpha is not None:
        paragraph(f"\n{_costs(setting.alpha, setting.cost_ends)}")
    heading("2. What psd is given")
    paragraph(f"{_devices(study)}\n\n{_sequential(setting.options, study)}\n")
    out.print(_star_table(study))
    paragraph(f"\n{_star(study)}")
    heading("3. Theorem 1 of the paper")
    paragraph(_theorem(setting.claims) + "\n")
    out.print(_ratio_table(setting.claims))
    paragraph("\n" + _ranges(setting.claims))


def _ms(seconds: float) -> str:
    return f"{1000.0 * seconds:,.2f}"


def _percent(share: float) -> str:
    return f"{100.0 * share:+.1f} %"


def _described(options: TheoryOptions, study: Study) -> str:
    stages, source = study.stages, ""
    given = {"V": options.verify_ms, "t": options.draft_ms}
    published = [name for name, value in given.items() if value is None]
    if published:
        fitted = "" if options.k in (3, 4) else f", extrapolated to k = {options.k} from k = 3 and 4"
        source = (
            f" {' and '.join(published)}: medians for {options.drafter} drafting for Qwen3-32B, arXiv 2603.18016v1, "
            f"Fig. 25{fitted}."
        )
    return (
        f"V = {_ms(stages.verify_s)} ms to verify, t = {_ms(stages.draft_s)} ms to draft, o = "
        f"{_ms(stages.overhead_s)} ms that nothing hides; k = {study.num_draft}, m = {study.batch_size}, devices "
        f"{study.target_devices} + {study.draft_devices}.{source} Acceptance {options.acceptance}: {study.tokens:.3f} "
        f"tokens per request and round ({study.tokens_without_bonus:.3f} without the bonus token after k accepted "
        "drafts). Steady state, full batches; prompts and the drain at the end are left out."
    )


MODE_ROWS: Final[Sequence[tuple[str, Callable[[ModeFigures], str]]]] = (
    ("Devices", lambda mode: str(mode.num_devices)),
    ("Requests in flight", lambda mode: str(mode.num_in_flight)),
    ("Requests per step", lambda mode: str(mode.step_requests)),
    ("Tokens per request and round", lambda mode: f"{mode.tokens:.3f}"),
    ("Step (ms)", lambda mode: _ms(mode.step_s)),
    (f"T for {T_TOKENS} tokens of all requests (s)", lambda mode: f"{mode.time_s(T_TOKENS):.3f}"),
    ("Output token throughput (tok/s)", lambda mode: f"{mode.throughput:,.1f}"),
    ("Output throughput per device (tok/s)", lambda mode: f"{mode.throughput_per_device:,.1f}"),
    ("Between a request's own rounds (ms)", lambda mode: _ms(mode.period_s)),
    ("TPOT (ms)", lambda mode: _ms(mode.tpot_s)),
)


def _modes_table(study: Study) -> Table:
    from rich.table import Table

    table = Table("", title=f"At k = {study.num_draft}", title_justify="left")
    for mode in study.modes:
        table.add_column(mode.name, justify="right")
    for label, text in MODE_ROWS:
        table.add_row(label, *(text(mode) for mode in study.modes))
    return table


def _gains(study: Study) -> str:
    _, sd, psd, _ = study.modes
    return (
        f"T_SD = {sd.time_s(T_TOKENS):.3f} s and T_PSD = {psd.time_s(T_TOKENS):.3f} s: {psd.name} has "
        f"{_percent(study.gain)} throughput over {sd.name}, (V + t + o) / (max(V, t) + o) - 1, which is "
        f"{100 * reduction_of_gain(study.gain):.1f} % less time, and {_percent(study.per_device_gain)} per device. At "
        "equal k no acceptance changes that, and no stage times give more than +100 %."
    )


def _best_table(study: Study) -> Table:
    from rich.table import Table

    title = f"Each mode's own best k (0 is plain decoding; tried up to {len(study.rates)})"
    table = Table("", title=title, title_justify="left")
    for text in ("k", "Tokens per round", "Step (ms)", "Step per token (ms)", "Gain"):
        table.add_column(text, justify="right")
    for name, best, gain in (("sd", study.best_sd, "-"), ("psd", study.best_psd, _percent(study.gain_at_best))):
        figures = (str(best.num_draft), f"{best.tokens:.3f}", _ms(best.step_s), _ms(best.seconds_per_token))
        table.add_row(name, *figures, gain)
    return table


def _jitter(study: Study) -> str:
    gains = zip(CVS[1:], study.gains_with_jitter(CVS)[1:], strict=True)
    listed = ", ".join(f"{_percent(gain)} at CV {100 * cv:g} %" for cv, gain in gains)
    return (
        "If stage times vary (independent, lognormal), a psd step takes E[max(V, t)] + o; at this k the gain is then "
        f"{listed}."
    )


def _costs(alpha: float, ends: tuple[float, float] | None) -> str:
    share = f"{100 * REDUCTIONS[0]:g} %"
    if ends is None:
        return (
            f"At acceptance {alpha:g} no drafter lets psd save {share} of the time, each mode at its best k and o = 0."
        )
    return (
        f"Fast drafters leave little to hide: at acceptance {alpha:g} and o = 0, each mode at its best k, psd can save "
        f"{share} of the time only if a drafting pass takes at least {ends[0]:.3f} V (and at most {ends[1]:.3f} V)."
    )


def _devices(study: Study) -> str:
    if study.draft_devices == 0:
        return "Devices: psd is given none besides."
    found = study.break_even_draft_range
    needed = "which no t reaches at this V and o"
    if found is not None:
        ends = f"{_ms(found[0])} and {_ms(found[1])} ms"
        needed = f"so at this V and o t must lie between {ends} (it is {_ms(study.stages.draft_s)})"
    return (
        f"Devices: psd has {study.target_devices} + {study.draft_devices}, sd {study.target_devices}. Per device it "
        f"breaks even at a gain of {_percent(study.break_even_gain)}, {needed}. Here it "
        f"{'pays' if study.per_device_gain >= 0 else 'does not pay'}: {_percent(study.gain)}, per device "
        f"{_percent(study.per_device_gain)}."
    )


def _sequential(options: TheoryOptions, study: Study) -> str:
    *_, psd, sd_2m = study.modes
    m, given = options.m, {"V": options.verify_2m_ms, "t": options.draft_2m_ms}
    assumed = [f"{name}({2 * m}) = {name}({m})" for name, value in given.items() if value is None]
    note = f" (assumed: {', '.join(assumed)}, as in the paper's theory)" if assumed else ""
    return (
        f"Requests in flight: {psd.name} keeps {psd.num_in_flight} on {psd.num_devices} devices, and {sd_2m.name} as "
        f"many on {sd_2m.num_devices}. psd has the higher throughput only if 2 (max(V(m), t(m)) + o) < V(2m) + t(2m) + "
        f"o, so if V({2 * m}) + t({2 * m}) is above {_ms(study.break_even_sequential_s)} ms. It is "
        f"{_ms(study.at_2m.verify_s + study.at_2m.draft_s)} ms{note}: psd "
        f"{'wins' if study.over_sd_2m > 1.0 else 'does not win'}, with {study.over_sd_2m:.3f} times the throughput. "
        f"And a request's own rounds are never closer together in psd than in {study.modes[1].name}: what psd shortens "
        "is the queue."
    )


def _star_table(study: Study) -> Table:
    from rich.table import Table

    table = Table(title="The star: one drafter shared by n targets, k as above", title_justify="left")
    for text in ("n", "Devices", "Step (ms)", "Drafter busy", "Gain of a target", "Gain per device"):
        table.add_column(text, justify="right")
    for star in study.stars(MOST_REPLICAS):
        busy = f"{100 * star.drafter_utilisation:.0f} %"
        gains = _percent(star.gain), _percent(star.per_device_gain)
        table.add_row(str(star.num_replicas), str(star.num_devices), _ms(star.step_s), busy, *gains)
    return table


def _star(study: Study) -> str:
    even, best = study.break_even_num_replicas, study.best_num_replicas
    pays = "It pays per device for no n" if even is None else f"It pays per device from n = {even}"
    most = "and gains with every target more" if best is None else f"and is best at n = {best}"
    return (
        f"{pays}, {most}. A step takes max(max(V, t) + o, n t) if the drafter serves one batch at a time; with stage "
        "times that vary, targets also wait for each other."
    )


def _theorem(found: Claims) -> str:
    low, high = found.claimed
    saved = 100 * (1 - 1 / found.counter_example)
    return (
        f"It says: T_SD > {theorem.CLAIMED_RATIO} T_PSD, so at least 37 % less time, whenever alpha V >= 1.68 (arXiv "
        "2603.18016v1; after drafting for t a share f(t) = 1 - e^(-alpha t) of the drafts is accepted, and each mode "
        f"takes its own best t). As stated that is false: at alpha V = {COUNTER_EXAMPLE:g} the exact ratio is "
        f"{found.counter_example:.3f}, {saved:.1f} % less time, and it goes to 1 as alpha V grows. The proof bounds "
        "the ratio from below by 1 + ln(1 + alpha V) / (alpha V), and takes the value of that at the left end for its "
        f"minimum; but it falls, so {found.bound_there:.4f} at alpha V = {found.starts_at:.4f} is its maximum.\n\n"
        f"What is true: the ratio is {theorem.CLAIMED_RATIO} or more exactly for {low:.3f} <= alpha V <= {high:.3f}; "
        f"it lies above that bound for every alpha V >= {found.starts_at:.3f}; and it reaches 2, 50 % less time, at "
        f"alpha V = {found.peak:.4f}, and is never more."
    )


def _ratio_table(found: Claims) -> Table:
    from rich.table import Table

    table = Table("alpha V", title="The exact ratio", title_justify="left")
    for x in SHOWN_X:
        table.add_column(f"{x:g}", justify="right")
    table.add_row("T_SD / T_PSD", *(f"{ratio:.3f}" for ratio in found.ratios))
    table.add_row("Less time (%)", *(f"{100 * (1 - 1 / ratio):.1f}" for ratio in found.ratios))
    return table


def _ranges(found: Claims) -> str:
    listed = "; ".join(
        f"{100 * share:g} % for {low:.3f} <= alpha V <= {high:.2f}"
        for share, (low, high) in zip(REDUCTIONS, found.ranges, strict=True)
    )
    return f"At least so much less time: {listed}."
