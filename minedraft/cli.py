"""The command line: what can be typed, and how a command ends.

Exit codes: 0 all went well; 1 a check failed; 2 bad input, or a file, model or policy that can't be used, with one
line on stderr; 130 Ctrl-C.

Law of this file: options only. Commands live in `minedraft.commands` and are imported when they are called.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from minedraft.commands.errors import BAD_INPUT, INTERRUPTED, CommandError
from minedraft.config_messages import ConfigError, one_line
from minedraft.config_tree import Override, parse_assignment

app = typer.Typer(
    name="minedraft",
    help="Batch-parallel speculative decoding: simulate it, run it on real models, compare, replay.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigArgument = Annotated[
    str | None, typer.Argument(metavar="[CONFIG.toml]", help="Describes the run; without it the defaults hold.")
]
ModeOption = Annotated[str | None, typer.Option("--mode", help="ar, sd or psd.")]
PolicyOption = Annotated[
    list[str],
    typer.Option(
        "--policy",
        metavar="SLOT=NAME[,key=value]",
        help="A policy for a slot, by name or as package.module:Class. Repeatable.",
    ),
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|PATH",
        help="synthetic, azure-conv-like, azure-code-like, or a trace file (.csv Azure, .jsonl Mooncake or plain, "
        ".json ShareGPT).",
    ),
]
NumRequestsOption = Annotated[int | None, typer.Option(help="How many requests.")]
SeedOption = Annotated[int | None, typer.Option(help="Of all random numbers.")]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any field of the configuration, such as scheduler.max_batch_size=32."
    ),
]
JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON; - is stdout.")
]
JournalOption = Annotated[
    str | None, typer.Option("--journal", metavar="FILE", help="Record every event and decision, for replay.")
]
TraceOption = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="Write a timeline; open it at ui.perfetto.dev.")
]


def _version(wanted: bool) -> None:
    if wanted:
        import minedraft

        typer.echo(f"minedraft {minedraft.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def simulate(
    config: ConfigArgument = None,
    mode: ModeOption = None,
    policy: PolicyOption = [],  # noqa: B006 (typer copies it)
    workload: WorkloadOption = None,
    num_requests: NumRequestsOption = None,
    seed: SeedOption = None,
    set_: SetOption = [],  # noqa: B006
    json: JsonOption = None,
    journal: JournalOption = None,
    trace: TraceOption = None,
    detailed: Annotated[bool, typer.Option("--detailed", help="Add per-request lists to the JSON.")] = False,
) -> None:
    """Simulate a run and print its figures. Needs no model and no GPU.

    Without anything it simulates the setting of the MineDraft paper. `minedraft config` prints a file to start from.
    """
    from minedraft.commands.drive import Recordings
    from minedraft.commands.simulate import simulate_command

    overrides = _overrides(mode, policy, workload, num_requests, seed, set_)
    simulate_command(config, overrides, json, Recordings(journal, trace), detailed)


def _overrides(
    mode: str | None,
    policies: list[str],
    workload: str | None,
    num_requests: int | None,
    seed: int | None,
    settings: list[str],
) -> list[Override]:
    """What the options say, on top of the file; `--set` comes last, since it is the most specific."""
    found = []
    if mode is not None:
        found.append(Override("mode", mode, f"--mode {mode}"))
    if workload is not None:
        found.append(_workload(workload))
    if num_requests is not None:
        found.append(Override("workload.num_requests", num_requests, f"--num-requests {num_requests}"))
    if seed is not None:
        found.append(Override("seed", seed, f"--seed {seed}"))
    found += [policy_override(text) for text in policies]
    return found + [_assignment(text) for text in settings]


def policy_override(text: str) -> Override:
    """What `--policy SLOT=NAME,key=value` sets."""
    slot, equals, spec = text.partition("=")
    if not equals or not slot or not spec:
        raise CommandError(f"--policy {text!r}: write it as SLOT=NAME or SLOT=NAME,key=value")
    return Override(f"policies.{slot.strip().replace('-', '_')}", spec.strip(), f"--policy {text}")


def _assignment(text: str) -> Override:
    try:
        return parse_assignment(text, "--set")
    except ValueError as error:
        raise CommandError(str(error)) from error


def _workload(text: str) -> Override:
    from difflib import get_close_matches

    from minedraft.config_tables import NAMED_WORKLOAD_KINDS

    origin = f"--workload {text}"
    if text in NAMED_WORKLOAD_KINDS:
        return Override("workload", {"kind": text}, origin)
    if Path(text).is_file():
        return Override("workload", {"kind": "trace", "path": text}, origin)
    near = get_close_matches(text, NAMED_WORKLOAD_KINDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"name {', '.join(NAMED_WORKLOAD_KINDS)} or a trace file"
    raise CommandError(f"{origin}: no such workload or file; {hint}")


@app.command()
def config() -> None:
    """Print a configuration file that says all that holds by default, to start from."""
    from minedraft.commands.example_config import EXAMPLE

    typer.echo(EXAMPLE, nl=False)


@app.command()
def compare(
    config: ConfigArgument = None,
    mode: Annotated[list[str], typer.Option("--mode", help="ar, sd or psd. Repeat it to compare modes.")] = [],  # noqa: B006
    policy: PolicyOption = [],  # noqa: B006
    vary: Annotated[
        list[str],
        typer.Option(
            "--vary",
            metavar="KEY=VALUE,VALUE",
            help="Any field of the configuration with several values, such as scheduler.max_batch_size=16,32. "
            "Repeatable.",
        ),
    ] = [],  # noqa: B006
    workload: WorkloadOption = None,
    num_requests: NumRequestsOption = None,
    seed: SeedOption = None,
    set_: SetOption = [],  # noqa: B006
    json: JsonOption = None,
) -> None:
    """Simulate several runs side by side: same requests, same luck.

    Every combination of --mode, of several --policy for one slot, and of --vary is a column, as is each [[variants]]
    table of the file (a name, and whatever differs). Ratios are to the first column. Without any of these the modes
    ar, sd and psd are compared.
    """
    from minedraft.commands.compare import compare_command

    overrides = _overrides(None, [], workload, num_requests, seed, set_)
    compare_command(config, mode, [policy_override(text) for text in policy], vary, overrides, json)


@app.command()
def run(
    config: ConfigArgument = None,
    backend: Annotated[str, typer.Option(help="The world: torch.")] = "torch",
    target: Annotated[str, typer.Option(help="Embedded name, local folder or hub name.")] = "smollm2",
    draft: Annotated[str, typer.Option(help="The same for the drafter.")] = "smollm2-drop6",
    mode: ModeOption = None,
    k: Annotated[int | None, typer.Option("-k", help="Drafts per round (scheduler.num_speculative_tokens).")] = None,
    prompt: Annotated[list[str], typer.Option("--prompt", help="A prompt. Repeatable.")] = [],  # noqa: B006
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompts, one per line; .jsonl for objects with prompt, max_tokens, ..."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Sample among the k likeliest; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Sample among the likeliest with this mass.")] = 1.0,
    acceptance: Annotated[
        str, typer.Option(help="Of sampled drafts: rejection, or coupled (same text in every mode).")
    ] = "rejection",
    dtype: Annotated[str, typer.Option(help="Of both models: auto, float32, bfloat16, float16, float64.")] = "auto",
    chat: Annotated[bool, typer.Option(help="Use the model's chat template.")] = True,
    target_device: Annotated[str | None, typer.Option(help="cpu:N (pinned to a core), cpu, cuda:N.")] = None,
    draft_device: Annotated[str | None, typer.Option(help="Likewise; by default the second core.")] = None,
    policy: PolicyOption = [],  # noqa: B006
    seed: Annotated[int | None, typer.Option(help="Of sampled texts; prompt number i gets seed + i.")] = None,
    set_: SetOption = [],  # noqa: B006
    json: JsonOption = None,
    journal: JournalOption = None,
    trace: TraceOption = None,
) -> None:
    """Generate text with a real target and drafter, each in its own process on its own device."""
    from minedraft.commands.drive import Recordings
    from minedraft.commands.torch_run import Prompt, TorchOptions, read_prompts, run_command

    if backend != "torch":
        raise CommandError(f"--backend {backend}: unknown; use torch")
    texts = [Prompt(text) for text in prompt] + ([] if prompts is None else read_prompts(prompts))
    if not texts:
        raise CommandError("nothing to generate; give --prompt TEXT or --prompts FILE")
    overrides = _overrides(mode, policy, None, None, seed, set_)
    if k is not None:
        overrides.append(Override("scheduler.num_speculative_tokens", k, f"-k {k}"))
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
    options = TorchOptions(target, draft, target_device, draft_device, sampling, chat, dtype, acceptance)
    run_command(config, overrides, options, texts, json, Recordings(journal, trace))


@app.command()
def replay(journal: Annotated[str, typer.Argument(metavar="JOURNAL", help="What --journal wrote.")]) -> None:
    """Feed a recorded run to a fresh scheduler and check that it decides the same. Exit code 1 if not."""
    from minedraft.commands.replay_journal import replay_command

    replay_command(journal)


models_app = typer.Typer(help="The embedded models: list them, get them.", rich_markup_mode=None)
app.add_typer(models_app, name="models")


@models_app.callback(invoke_without_command=True)
def _models(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        models_list()


@models_app.command("list")
def models_list() -> None:
    """Show the embedded models and whether they are here."""
    from minedraft.commands.models import list_command

    list_command()


@models_app.command("get")
def models_get(name: Annotated[str, typer.Argument(help="Such as smollm2.")]) -> None:
    """Download or make a model, once; prints its folder."""
    from minedraft.commands.models import get_command

    get_command(name)


@models_app.command("path")
def models_path(name: Annotated[str, typer.Argument(help="Such as smollm2.")]) -> None:
    """Print the folder of a model that is here."""
    from minedraft.commands.models import path_command

    path_command(name)


@app.command()
def demo(
    simulate_only: Annotated[bool, typer.Option("--simulate-only", help="Leave the real models out.")] = False,
    output_dir: Annotated[str, typer.Option(metavar="FOLDER", help="Where files are written.")] = "out/demo",
) -> None:
    """Show it all: real models in three modes with equal texts, then the paper's setting in simulation."""
    from minedraft.commands.demo import demo_command

    demo_command(Path(output_dir), simulate_only)


def run_cli(arguments: list[str] | None = None) -> int:
    """Carry out a command line.

    Args:
        arguments: without the program's name; None for those of the process.

    Returns:
        The exit code.
    """
    try:
        result: Any = app(args=arguments, prog_name="minedraft", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", INTERRUPTED)
    except CommandError as error:
        return _fail(str(error), error.exit_code)
    except ConfigError as error:
        return _fail(str(error), BAD_INPUT)
    except BrokenPipeError:
        # The reader is gone, as with `| head`; what is still buffered must not fail a second time at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BAD_INPUT
    except Exception as error:
        # Usage errors. Newer versions of typer bring their own copy of click's classes, so ask for what they can do.
        if hasattr(error, "format_message"):
            return _fail(f"{error.format_message().rstrip('.')}; try --help", BAD_INPUT)
        raise
    return result if isinstance(result, int) else 0


def _fail(message: str, exit_code: int) -> int:
    typer.echo(f"minedraft: error: {one_line(message)}", err=True)
    return exit_code


def main() -> None:
    """The program's entry point."""
    # Policies given as module:Class may lie where the user is, as for `python -m`.
    sys.path.append("")
    sys.exit(run_cli())
