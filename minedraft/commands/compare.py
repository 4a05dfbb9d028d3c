"""`minedraft compare`: several runs side by side, over the same requests with the same luck."""

from __future__ import annotations

from collections.abc import Sequence

from minedraft.commands.compare_options import CompareOptions
from minedraft.commands.drive import Outcome
from minedraft.commands.errors import CommandError, InterruptedRunError
from minedraft.commands.many_runs import carry_out, run_once
from minedraft.commands.outputs import check_outputs, files_read
from minedraft.commands.repeated import find_line
from minedraft.commands.report import Column, as_json, check_writable, print_report, write_json
from minedraft.commands.simulate import new_collector, simulate
from minedraft.commands.variants import Axes, Variant, make_variants
from minedraft.config_tree import Override
from minedraft.statistics import check_intervals
from minedraft.theory.extra import MissingTheoryExtraError


def compare_command(path: str | None, axes: Axes, overrides: Sequence[Override], options: CompareOptions) -> None:
    """Run all variants, print what was asked for, write the files.

    Raises:
        ConfigError: a configuration can't be used; none has run.
        CommandError: an option can't be used; or a run failed, and what was done by then has been written.
    """
    _check(axes, options)
    variants = make_variants(path, axes, overrides)
    outputs = {"--json": options.json_path, "--csv": options.csv_path, "--figure": options.figure_path}
    check_outputs(outputs, files_read(path, *(variant.config.to_dict() for variant in variants)))
    if options.find_share is not None:
        from minedraft.commands.find_rate import find_rates

        find_rates(variants, options)
    elif options.num_seeds > 1 or axes.x_name is not None or options.csv_path is not None or options.metrics:
        from minedraft.commands.compare_seeds import compare_over_seeds

        compare_over_seeds(variants, axes, options)
    else:
        _compare_once(variants, options)


def _check(axes: Axes, options: CompareOptions) -> None:
    for name, value in (("--seeds", options.num_seeds), ("--jobs", options.jobs)):
        if value < 1:
            raise CommandError(f"{name} {value}: must be a whole number >= 1")
    if not 0.5 <= options.confidence < 1.0:
        raise CommandError(f"--confidence {options.confidence:g}: must be at least 0.5 and below 1, such as 0.95")
    if options.find_share is not None:
        if not 0.0 < options.find_share <= 1.0:
            raise CommandError(
                f"--find-rate {options.find_share:g}: is a share of the requests, in (0, 1], such as 0.9"
            )
        if axes.x_name is not None or options.metrics or options.csv_path or options.figure_path:
            raise CommandError(
                "--find-rate: looks for a rate itself; leave out --rates, --over, --metric, --csv and --figure"
            )
    if options.figure_path is not None:
        from minedraft.commands.sweep_figure import check_figure

        if axes.x_name is None:
            raise CommandError("--figure: draws figures over an axis; add --rates 1,2,4 or --over KEY=1,2,4")
        check_figure(options.figure_path)
    if options.num_seeds > 1:
        try:
            check_intervals()
        except MissingTheoryExtraError as error:
            raise CommandError(f"--seeds {options.num_seeds}: {error}") from error
    for target in (options.json_path, options.csv_path, options.figure_path):
        check_writable(target)


def _compare_once(variants: Sequence[Variant], options: CompareOptions) -> None:
    """One seed and no sweep: all figures of every run, in one table."""
    baseline = find_line(options.baseline, variants)
    variants = sorted(variants, key=lambda variant: variant.line != baseline)  # ratios are to the first column
    outcomes, failure = _run(variants, options.jobs)
    done = [(variant, outcome) for variant, outcome in zip(variants, outcomes, strict=False) if outcome is not None]
    columns = [
        Column(
            variant.name, variant.config.mode, variant.config.scheduler_config(), outcome, variant.config.closed_loop
        )
        for variant, outcome in done
    ]
    if options.json_path != "-":
        print_report(columns, title=f"Simulated runs, seed {variants[0].config.seed}")
    if options.json_path is not None:
        runs = [
            {**as_json(column, "compare", variant.config.seed), "config": variant.config.to_dict()}
            for column, (variant, _) in zip(columns, done, strict=True)
        ]
        write_json(options.json_path, {"variants": runs})
    if failure is not None:
        raise failure
    for column in columns:
        if column.outcome.error is not None:
            raise CommandError(f"{column.name}: {column.outcome.error}", column.outcome.error.exit_code)


def _run(variants: Sequence[Variant], jobs: int) -> tuple[list[Outcome | None], CommandError | None]:
    """With one job every run has its own progress bar, and what an interrupted one did is kept."""
    if jobs > 1:
        return carry_out(run_once, [variant.config for variant in variants], jobs, "comparing")
    outcomes: list[Outcome | None] = []
    for variant in variants:
        outcome = simulate(variant.config, new_collector(variant.config), label=variant.name)
        outcomes.append(outcome)
        if isinstance(outcome.failure, InterruptedRunError):
            break
    return outcomes, None
