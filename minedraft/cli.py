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
ModeOption = Annotated[str | None, typer.Option("--mode", help="ar, sd or psd; simulated: pearl, pearl-minedraft.")]
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
GoodputOption = Annotated[
    list[str],
    typer.Option(
        "--goodput",
        metavar="ttft:MS,tpot:MS,e2el:MS",
        help="Limits that a good request keeps, as in vllm bench serve; any of the three.",
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
TargetDevicesOption = Annotated[
    str | None,
    typer.Option(
        "--target-devices",
        metavar="0,1",
        help="The target's devices: positions among the visible GPUs, UUIDs, or cores. By default the first ones.",
    ),
]
DraftDevicesOption = Annotated[
    str | None,
    typer.Option("--draft-devices", metavar="2", help="The drafter's devices, likewise. By default the last ones."),
]
DraftArgOption = Annotated[
    list[str],
    typer.Option(
        "--draft-arg",
        metavar="KEY=VALUE",
        help="A vLLM engine argument of the drafter, such as gpu_memory_utilization=0.5. Repeatable.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        import minedraft

        typer.echo(f"minedraft {minedraft.__version__}{minedraft.BUILD.label}")
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
    goodput: GoodputOption = [],  # noqa: B006
    set_: SetOption = [],  # noqa: B006
    json: JsonOption = None,
    journal: JournalOption = None,
    trace: TraceOption = None,
    detailed: Annotated[bool, typer.Option("--detailed", help="Add per-request lists to the JSON.")] = False,
) -> None:
    """Simulate a run and print its figures. Needs no model and no GPU.

    Without anything it simulates the setting of the MineDraft paper. `minedraft config` prints a file to start from.
    """
    from minedraft.commands.simulate import simulate_command

    overrides = [*_overrides(mode, policy, workload, num_requests, seed, set_), *_limits(goodput)]
    simulate_command(config, overrides, json, _recordings(journal, trace), detailed)


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


def _recordings(journal: str | None, trace: str | None) -> Any:
    """The `Recordings`; stdout has the table or the JSON, and nothing else can go there."""
    from minedraft.commands.drive import Recordings

    for option, path in (("--journal", journal), ("--trace", trace)):
        if path == "-":
            raise CommandError(f"{option} -: can't go to stdout; name a file")
    return Recordings(journal, trace)


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

    from minedraft.config_workload import NAMED_WORKLOAD_KINDS

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
    mode: Annotated[list[str], typer.Option("--mode", help="ar, sd, psd, pearl or pearl-minedraft. Repeat it.")] = [],  # noqa: B006
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
    rates: Annotated[
        str | None,
        typer.Option(metavar="1,2,4", help="A load sweep: every variant at these arrival rates, in requests/s."),
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=1,2,4",
            help="A sweep over any other number, such as workload.arrivals.concurrency=8,16,32.",
        ),
    ] = None,
    find_rate: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Find the highest arrival rate at which this share of the requests keeps the limits of --goodput.",
        ),
    ] = None,
    goodput: GoodputOption = [],  # noqa: B006
    workload: WorkloadOption = None,
    num_requests: NumRequestsOption = None,
    seed: SeedOption = None,
    seeds: Annotated[
        int, typer.Option(help="Run each variant under so many seeds, from --seed on: intervals, paired comparisons.")
    ] = 1,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Compare with this variant; by default the first.")
    ] = None,
    metric: Annotated[
        list[str],
        typer.Option(
            metavar="NAME", help="A figure to show, by its name in the JSON, such as p99_ttft_ms. Repeatable."
        ),
    ] = [],  # noqa: B006
    jobs: Annotated[int, typer.Option(help="Runs at a time, each on a core. The figures are the same.")] = 1,
    set_: SetOption = [],  # noqa: B006
    json: JsonOption = None,
    csv: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write all figures with their intervals, a row each.")
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw a sweep: .png, .svg or .pdf. Needs the extra `plot`."),
    ] = None,
) -> None:
    """Simulate several runs side by side: same requests, same luck.

    Every combination of --mode, of several --policy for one slot, and of --vary is a variant, as is each [[variants]]
    table of the file (a name, and whatever differs). Without any of these the modes ar, sd and psd are compared.

    With --seeds every variant sees the same seeds, and differences are judged pair by pair (needs the extra
    `theory`). With --rates or --over variants are compared at each value.
    """
    from minedraft.commands.compare import compare_command
    from minedraft.commands.compare_options import CompareOptions
    from minedraft.commands.variants import Axes

    overrides = [*_overrides(None, [], workload, num_requests, seed, set_), *_limits(goodput)]
    axes = Axes(mode, [policy_override(text) for text in policy], vary, over, rates)
    options = CompareOptions(seeds, jobs, confidence, baseline, metric, find_rate, json, csv, figure)
    compare_command(config, axes, overrides, options)


def _limits(texts: list[str]) -> list[Override]:
    """What `--goodput ttft:500,tpot:50` sets, in vLLM's words."""
    found = []
    for part in ",".join(texts).replace(" ", ",").split(",") if texts else ():
        name, colon, value = part.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if not colon or name not in ("ttft", "tpot", "e2el") or not 0.0 < limit < float("inf"):
            raise CommandError(f"--goodput {part!r}: write it as ttft:500,tpot:50,e2el:10000, in milliseconds")
        found.append(Override(f"slo.{name}_ms", limit, f"--goodput {part}"))
    return found


@app.command()
def run(
    config: ConfigArgument = None,
    backend: Annotated[str, typer.Option(help="The world: torch or vllm.")] = "torch",
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
    dtype: Annotated[
        str, typer.Option(help="Of both models: auto, float32, bfloat16, float16, float64 (torch only).")
    ] = "auto",
    chat: Annotated[bool, typer.Option(help="Use the model's chat template.")] = True,
    target_device: Annotated[
        str | None, typer.Option(help="cpu:N (pinned to a core), cpu, cuda:N; with vllm also cuda:0,1.")
    ] = None,
    draft_device: Annotated[str | None, typer.Option(help="Likewise; by default the second core.")] = None,
    policy: PolicyOption = [],  # noqa: B006
    seed: Annotated[int | None, typer.Option(help="Of sampled texts; prompt number i gets seed + i.")] = None,
    set_: SetOption = [],  # noqa: B006
    json: JsonOption = None,
    journal: JournalOption = None,
    trace: TraceOption = None,
    engine_arg: Annotated[
        list[str],
        typer.Option(
            "--engine-arg",
            metavar="KEY=VALUE",
            help="A vLLM engine argument of the target, such as max_model_len=4096. Repeatable; vllm only.",
        ),
    ] = [],  # noqa: B006
    draft_arg: DraftArgOption = [],  # noqa: B006
) -> None:
    """Generate text with a real target and drafter, each on its own device: with PyTorch alone, or in vLLM's engine."""
    from minedraft.commands import torch_run, vllm_run
    from minedraft.commands.outputs import NamedPath, check_outputs, files_read
    from minedraft.commands.torch_run import Prompt, read_prompts
    from minedraft.commands.vllm_extra import nested
    from minedraft.config import read_tree

    if backend not in ("torch", "vllm"):
        raise CommandError(f"--backend {backend}: unknown; use torch or vllm")
    if backend == "torch" and (engine_arg or draft_arg):
        raise CommandError(f"--{'engine' if engine_arg else 'draft'}-arg: only with --backend vllm; remove it")
    if backend == "vllm" and acceptance != "rejection":
        raise CommandError(f"--acceptance {acceptance}: vLLM verifies by rejection sampling only; remove it")
    read = [] if prompts is None else [NamedPath("--prompts", prompts)]
    outputs = {"--json": json, "--journal": journal, "--trace": trace}
    check_outputs(outputs, [*files_read(config, read_tree(config)), *read])
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
    recordings = _recordings(journal, trace)
    devices = (target_device, draft_device)
    if backend == "vllm":
        arguments = nested(engine_arg, "--engine-arg"), nested(draft_arg, "--draft-arg")
        options = vllm_run.VllmOptions(target, draft, *devices, sampling, chat, dtype, *arguments)
        vllm_run.run_command(config, overrides, options, texts, json, recordings)
        return
    torch_options = torch_run.TorchOptions(target, draft, *devices, sampling, chat, dtype, acceptance)
    torch_run.run_command(config, overrides, torch_options, texts, json, recordings)


@app.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
def serve(
    context: typer.Context,
    rest: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET [VLLM OPTIONS]", help="The target, and any option of `vllm serve`."),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="The drafter: embedded name, local folder or hub name.")] = None,
    k: Annotated[int | None, typer.Option("-k", help="Drafts per round; 4 if nothing is said.")] = None,
    mode: ModeOption = None,
    policy: PolicyOption = [],  # noqa: B006
    set_: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any setting under additional_config.minedraft, such as drafter.deadline_s=5. Repeatable.",
        ),
    ] = [],  # noqa: B006
    target_devices: TargetDevicesOption = None,
    draft_devices: DraftDevicesOption = None,
    draft_arg: DraftArgOption = [],  # noqa: B006
) -> None:
    """Serve a target over HTTP: vLLM's own OpenAI server, with batch-parallel speculative decoding in its engine."""
    from minedraft.commands.serve import MORE_HELP, serve_command, wants_help

    if wants_help(rest or ()):
        typer.echo(f"{context.get_help()}\n\n{MORE_HELP}")
        return
    policies = _policy_specs(policy)
    serve_command(rest or (), _launch_options(draft, k, mode, policies, set_, target_devices, draft_devices, draft_arg))


def _policy_specs(texts: list[str]) -> dict[str, str]:
    overrides = [policy_override(text) for text in texts]
    return {override.key.removeprefix("policies."): str(override.value) for override in overrides}


def _launch_options(
    draft: str | None,
    k: int | None,
    mode: str | None,
    policies: dict[str, str],
    settings: list[str],
    target_devices: str | None,
    draft_devices: str | None,
    draft_args: list[str],
) -> Any:
    from minedraft.backends.vllm.launch import LaunchOptions
    from minedraft.commands.vllm_extra import nested

    return LaunchOptions(
        draft=draft,
        k=k,
        mode=mode,
        policies=policies,
        settings=nested(settings, "--set"),
        draft_args=nested(draft_args, "--draft-arg"),
        target_devices=target_devices,
        draft_devices=draft_devices,
    )


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
def theory(
    drafter: Annotated[
        str, typer.Option(help="Published stage times: qwen3-0.6b, qwen3-1.7b or qwen3-4b drafting for Qwen3-32B.")
    ] = "qwen3-1.7b",
    verify_ms: Annotated[float | None, typer.Option(help="V: a verification of m requests, instead.")] = None,
    draft_ms: Annotated[float | None, typer.Option(help="t: drafting k tokens for m requests, instead.")] = None,
    verify_2m_ms: Annotated[float | None, typer.Option(help="V of 2m requests; without it, that of m.")] = None,
    draft_2m_ms: Annotated[float | None, typer.Option(help="t of 2m requests; without it, that of m.")] = None,
    overhead_ms: Annotated[float, typer.Option(help="o: time per round that no stage hides.")] = 0.0,
    k: Annotated[int, typer.Option("-k", help="Drafts per request and round.")] = 3,
    acceptance: Annotated[
        str,
        typer.Option(
            metavar="RATE[,RATE...]",
            help="One constant rate, or unconditional rates by position (vLLM's synthetic_acceptance_rates).",
        ),
    ] = "0.7",
    m: Annotated[int, typer.Option("-m", help="Requests per verification.")] = 16,
    target_devices: Annotated[int, typer.Option(help="Devices of the target.")] = 4,
    draft_devices: Annotated[int, typer.Option(help="Devices that psd has besides.")] = 1,
    json: JsonOption = None,
) -> None:
    """What arithmetic says: tokens and time per round, gains, break-even points, and where the paper's theorem fails.

    Without anything it is about the setting of the MineDraft paper. Needs scipy (the extra `theory`).
    """
    from minedraft.commands.theory import theory_command
    from minedraft.commands.theory_setting import TheoryOptions

    stages = verify_ms, draft_ms, verify_2m_ms, draft_2m_ms, overhead_ms
    theory_command(TheoryOptions(drafter, *stages, k, acceptance, m, target_devices, draft_devices), json)


validate_app = typer.Typer(help="The simulator against what was measured.", rich_markup_mode=None)
app.add_typer(validate_app, name="validate")


@validate_app.command("silicon")
def validate_silicon(
    cost: Annotated[str, typer.Option(help="Cost model: measured or roofline.")] = "measured",
    model: Annotated[list[str], typer.Option("--model", help="Only this model. Repeatable.")] = [],  # noqa: B006
    requests_per_client: Annotated[int, typer.Option(help="Length of each simulated run.")] = 10,
    json: JsonOption = None,
) -> None:
    """Plain serving in mode ar against real vLLM runs on H100 and H200; takes minutes. Needs the extra `timing`."""
    from minedraft.commands.validate import silicon_command

    silicon_command(cost, model, requests_per_client, json)


reproduce_app = typer.Typer(help="Published claims, worked out and judged.", rich_markup_mode=None)
app.add_typer(reproduce_app, name="reproduce")


@reproduce_app.command("paper")
def reproduce_paper(
    only: Annotated[
        str | None, typer.Option(metavar="CLAIM[,CLAIM...]", help="Of T1 to T12 and E1 to E18; all by default.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer requests, data sets and draft lengths.")] = False,
    output_dir: Annotated[str, typer.Option(metavar="FOLDER", help="For tables (CSV) and figures.")] = "out/paper",
    jobs: Annotated[int | None, typer.Option(help="Runs at a time; by default as many as there are cores.")] = None,
    no_figures: Annotated[bool, typer.Option("--no-figures", help="Draw nothing.")] = False,
    json: JsonOption = None,
) -> None:
    """The claims of the MineDraft paper (arXiv 2603.18016) against the theory and the simulator; takes minutes.

    Says of each whether it is met, missed or not comparable, and whether our figure was fitted or predicted. A missed
    claim doesn't change the exit code. Needs the extras `theory` and, for figures, `plot`.
    """
    from minedraft.commands.reproduce import ReproduceOptions, reproduce_command

    reproduce_command(ReproduceOptions(only, quick, output_dir, jobs, not no_figures), json)


@app.command("compile")
def compile_(
    check: Annotated[bool, typer.Option("--check", help="Only say whether a build is there and up to date.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Go back to plain Python.")] = False,
) -> None:
    """Make the scheduler 2.5 to 3 times and the simulator 1.6 to 1.9 times as fast: compile their modules with mypyc.

    Needs the extra `compile` and a C compiler, once. A build is used only as long as the sources are as they were.
    """
    from minedraft.commands.compile import compile_command

    compile_command(check, remove)


@app.command()
def demo(
    simulate_only: Annotated[bool, typer.Option("--simulate-only", help="Leave the real models out.")] = False,
    output_dir: Annotated[str, typer.Option(metavar="FOLDER", help="Where files are written.")] = "out/demo",
    backend: Annotated[
        str, typer.Option(help="torch; or vllm, which runs the models in vLLM and nothing else.")
    ] = "torch",
) -> None:
    """Show it all: real models in three modes with equal texts, then the paper's setting in simulation."""
    from minedraft.commands.demo import demo_command

    if backend not in ("torch", "vllm"):
        raise CommandError(f"--backend {backend}: unknown; use torch or vllm")
    if backend == "vllm":
        if simulate_only:
            raise CommandError("--simulate-only leaves nothing of --backend vllm; drop one of them")
        from minedraft.commands.demo_vllm import demo_vllm

        demo_vllm(Path(output_dir))
        return

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
