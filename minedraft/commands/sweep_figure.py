"""A sweep as a figure (`draw`): a panel per figure of the run, a line per variant, a band for its interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from minedraft.commands.errors import CommandError, unusable_file
from minedraft.commands.figures import Figure
from minedraft.commands.repeated import Repeated

REMEDY: Final = "install it with: pip install 'minedraft[plot]'"
ENDINGS: Final = (".png", ".svg", ".pdf")
MOST_COLUMNS: Final = 3
WIDTH_IN: Final = 4.2
HEIGHT_IN: Final = 3.2
BAND_ALPHA: Final = 0.2
MANY_TIMES: Final = 8.0  # a range of x this wide, or wider, is drawn on a logarithmic axis
MANY_TIMES_Y: Final = 50.0
MOST_TICKS: Final = 12
ROOM_ABOVE: Final = 1.08


def check_figure(path: str) -> None:
    """Find out before the runs that a figure can't be drawn.

    Raises:
        CommandError: the file's ending is unknown, or matplotlib isn't there.
    """
    if Path(path).suffix.lower() not in ENDINGS:
        raise CommandError(f"--figure {path}: must end in {', '.join(ENDINGS)}")
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise CommandError(f"--figure needs the plot extra (matplotlib is missing); {REMEDY}") from error


def draw(path: str, repeated: Sequence[Repeated], figures: Sequence[Figure], x_name: str) -> None:
    """Draw and write the file. Runs that were not in steady state have hollow markers.

    Raises:
        CommandError: the file can't be written.
    """
    from matplotlib.figure import Figure as Canvas

    num_columns = min(MOST_COLUMNS, len(figures))
    num_rows = -(-len(figures) // num_columns)
    canvas = Canvas(figsize=(WIDTH_IN * num_columns, HEIGHT_IN * num_rows), layout="constrained")
    panels = canvas.subplots(num_rows, num_columns, squeeze=False).flat
    for panel in panels[len(figures) :]:
        panel.remove()
    for panel, figure in zip(panels, figures, strict=False):
        for number, line in enumerate(dict.fromkeys(one.variant.line for one in repeated)):
            _draw_line(panel, [one for one in repeated if one.variant.line == line], figure, f"C{number}", line)
        panel.set_title(figure.label, fontsize="medium")
        panel.set_xlabel("requests/s" if x_name == "rate" else x_name)
        _scale(panel, repeated, figure)
        panel.grid(visible=True, alpha=BAND_ALPHA)
    panels[0].legend(fontsize="small")
    canvas.supxlabel(_caption(repeated), fontsize="small")
    try:
        # The same bytes from the same runs: no date in the file, no random salt in the names of an SVG.
        import matplotlib as mpl

        with mpl.rc_context({"svg.hashsalt": "minedraft"}):
            canvas.savefig(path, dpi=150, metadata=_no_date(path))
    except OSError as error:
        raise unusable_file(error) from error


def _caption(repeated: Sequence[Repeated]) -> str:
    num_seeds = max(len(one.outcomes) for one in repeated)
    parts = [] if num_seeds < 2 else [f"bands: {100.0 * repeated[0].confidence:g} % intervals over {num_seeds} seeds"]
    parts += [] if all(one.steady for one in repeated) else ["hollow: not in steady state"]
    return "; ".join(parts)


def _no_date(path: str) -> dict[str, None]:
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(Path(path).suffix.lower(), {})


def _draw_line(panel: Any, line: Sequence[Repeated], figure: Figure, colour: str, name: str) -> None:
    known = [(one, estimate) for one in line if (estimate := one.estimate(figure.name)) is not None]
    if not known:
        return
    x = [one.variant.x for one, _ in known]
    y = [figure.scale * estimate.value for _, estimate in known]
    panel.plot(x, y, color=colour, label=name, linewidth=1.5)
    for (one, _), at, value in zip(known, x, y, strict=True):
        panel.plot([at], [value], "o", color=colour, markerfacecolor=colour if one.steady else "white", markersize=5)
    low = [figure.scale * (estimate.value if estimate.low is None else estimate.low) for _, estimate in known]
    high = [figure.scale * (estimate.value if estimate.high is None else estimate.high) for _, estimate in known]
    panel.fill_between(x, low, high, color=colour, alpha=BAND_ALPHA, linewidth=0)


def _scale(panel: Any, repeated: Sequence[Repeated], figure: Figure) -> None:
    """Logarithmic axes where values span a wide range, and none of them is zero; ticks where there are runs."""
    x = sorted({one.variant.x for one in repeated if one.variant.x is not None})
    if x[0] > 0.0 and x[-1] >= MANY_TIMES * x[0]:
        panel.set_xscale("log", base=2)
    if len(x) <= MOST_TICKS:
        panel.set_xticks(x, [f"{value:g}" for value in x], minor=False)
    estimates = [estimate for one in repeated if (estimate := one.estimate(figure.name)) is not None]
    y = [estimate.value for estimate in estimates]
    if y and min(y) > 0.0 and max(y) >= MANY_TIMES_Y * min(y):
        panel.set_yscale("log")
    elif y and min(y) >= 0.0:
        top = max(estimate.value if estimate.high is None else estimate.high for estimate in estimates)
        panel.set_ylim(0.0, ROOM_ABOVE * figure.scale * top or 1.0)
