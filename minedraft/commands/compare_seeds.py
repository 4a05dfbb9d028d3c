"""`minedraft compare` over several seeds, or over the values of a sweep: means, intervals, paired comparisons."""

from __future__ import annotations

from collections.abc import Sequence

import minedraft
from minedraft.commands.compare_options import CompareOptions
from minedraft.commands.errors import CommandError, InterruptedRunError
from minedraft.commands.figures import BY_DEFAULT, OVER_LOAD, Figure, chosen
from minedraft.commands.many_runs import carry_out, run_once
from minedraft.commands.repeated import Repeated, baseline_of, find_line, repeated_json, with_seed
from minedraft.commands.report import console, write_json
from minedraft.commands.seeds_report import blocks_table, notes, sweep_table
from minedraft.commands.sweep_csv import write_csv
from minedraft.commands.variants import Axes, Variant


def compare_over_seeds(variants: Sequence[Variant], axes: Axes, options: CompareOptions) -> None:
    """Run, print, write.

    Raises:
        CommandError: an option can't be used; or a run failed or was interrupted, and what was done by then has been
            written.
    """
    line = find_line(options.baseline, variants)
    slo = all(variant.config.slo is not None for variant in variants)
    figures = chosen(options.metrics, BY_DEFAULT if axes.x_name is None else OVER_LOAD, slo=slo)
    repeated, failure = run_seeds(variants, options)
    if options.json_path != "-":
        _print(repeated, figures, line, axes.x_name, options)
    if options.json_path is not None:
        found = [repeated_json(one, baseline_of(one, repeated, line)) for one in repeated]
        head = {"minedraft": minedraft.__version__, "command": "compare", "baseline": line}
        write_json(
            options.json_path, {**head, "confidence": options.confidence, "x_name": axes.x_name, "variants": found}
        )
    if options.csv_path is not None:
        write_csv(options.csv_path, repeated, line, axes.x_name)
    if options.figure_path is not None and any(one.outcomes for one in repeated):
        from minedraft.commands.sweep_figure import draw

        draw(options.figure_path, repeated, figures, axes.x_name or "")
    if failure is not None:
        raise failure


def run_seeds(variants: Sequence[Variant], options: CompareOptions) -> tuple[list[Repeated], CommandError | None]:
    """Every variant under every seed; all variants of a seed before the next, so that what Ctrl-C leaves is paired.

    Raises:
        CommandError: variants differ in their seed.
    """
    seeds = seeds_of(variants, options.num_seeds)
    places = [(i, seed) for seed in seeds for i in range(len(variants))]
    tasks = [with_seed(variants[i].config, seed) for i, seed in places]
    outcomes, failure = carry_out(run_once, tasks, options.jobs, "comparing")
    repeated = [Repeated(variant, {}, options.confidence) for variant in variants]
    num_done = 0
    for (i, seed), outcome in zip(places, outcomes, strict=True):
        if outcome is None:
            continue
        if outcome.error is None:
            num_done += 1
            repeated[i].outcomes[seed] = outcome
        elif failure is None:
            failure = CommandError(f"{variants[i].name}, seed {seed}: {outcome.error}", outcome.error.exit_code)
    if isinstance(failure, InterruptedRunError):
        failure = InterruptedRunError(f"interrupted: {num_done} of {len(tasks)} runs were finished")
    return repeated, failure


def seeds_of(variants: Sequence[Variant], number: int) -> range:
    """The seeds that every variant runs under.

    Raises:
        CommandError: variants differ in their seed.
    """
    first = variants[0].config.seed
    for variant in variants:
        if variant.config.seed != first:
            raise CommandError(
                f"{variant.name}: its seed is {variant.config.seed}, that of {variants[0].name} is {first}, so nothing "
                "can be paired; leave the seed out of the variants and use --seeds"
            )
    return range(first, first + number)


def _print(
    repeated: Sequence[Repeated], figures: Sequence[Figure], line: str, x_name: str | None, options: CompareOptions
) -> None:
    if not any(one.outcomes for one in repeated):
        return
    out = console()
    first = repeated[0].variant.config.seed
    last = first + options.num_seeds - 1
    title = f"Simulated runs, seed {first}" if first == last else f"Simulated runs, seeds {first} to {last}"
    if x_name is None:
        out.print(blocks_table(repeated, figures, line, title), "")
    else:
        out.print(f"{title}\n")
        for figure in figures:
            out.print(sweep_table(repeated, figure, line, x_name), "")
    for note in notes(repeated, figures, line, options.confidence):
        out.print(note, style="dim")
