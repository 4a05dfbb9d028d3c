"""`minedraft serve`: vLLM's own OpenAI server with the core in its engine.

All options but minedraft's own belong to `vllm serve`: its parser reads them, and its code runs the server.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any, Final

import typer

from minedraft.commands.errors import CommandError
from minedraft.commands.vllm_extra import find_model, vllm_extra

NO_TARGET: Final = "which target? Name it: minedraft serve TARGET --draft DRAFT; or try --help"
HELP: Final = ("--help", "-h")
MORE_HELP: Final = (
    "All options of `vllm serve` are taken too. To see them:\n"
    "  minedraft serve --help=all             all of them\n"
    "  minedraft serve --help=ModelConfig     one section\n"
    "  minedraft serve --help=max-model-len   one option\n"
)


def wants_help(rest: Sequence[str]) -> bool:
    """Whether minedraft's own help is asked for, not vLLM's (`--help=...`)."""
    return any(text in HELP for text in rest)


def serve_command(rest: Sequence[str], options: Any) -> None:
    """Serve until a signal comes.

    Args:
        rest: the target and the options of `vllm serve`.
        options: a `minedraft.backends.vllm.launch.LaunchOptions`, with the draft's name as the user wrote it.

    Raises:
        CommandError: the options, models or devices can't be used, or the server failed.
    """
    if not rest:
        raise CommandError(NO_TARGET)
    with vllm_extra():
        args = _parse(rest)
        _launch(args, options)
        _run(args)


def _parse(rest: Sequence[str]) -> Any:
    """What vLLM's own parser makes of the arguments."""
    from minedraft.backends.vllm.device_facts import is_cpu_build

    is_cpu_build(os.environ)  # says that vLLM is missing, before anything is imported
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> Any:
            raise CommandError(f"{message}; `minedraft serve --help=all` shows vLLM's options")

    parser = make_arg_parser(Parser(prog="minedraft serve", description="Options of vLLM's server."))
    args = parser.parse_args(list(rest))
    if args.model_tag is None and args.model == parser.get_default("model"):
        raise CommandError(NO_TARGET)
    args.model = args.model_tag or args.model
    return args


def _launch(args: Any, options: Any) -> None:
    """Set the arguments and the environment that put the core into the engine."""
    import dataclasses

    from minedraft.backends.vllm.device_facts import facts_here
    from minedraft.backends.vllm.launch import plan_launch

    name = args.model
    args.model = find_model(name)
    if args.served_model_name is None and args.model != name:
        args.served_model_name = [name]  # else clients would have to name the folder
    if options.draft is not None:
        options = dataclasses.replace(options, draft=find_model(options.draft))
    launch = plan_launch(options, vars(args), facts_here(os.environ), os.environ)
    for note in launch.notes:
        typer.echo(f"minedraft: warning: {note}", err=True)
    typer.echo(f"minedraft: {_summary(launch)}", err=True)
    os.environ.update(launch.env)
    if getattr(args, "disable_log_stats", False):
        _leave_out_metrics()
    vars(args).update(launch.engine)
    args.model_tag = args.model


def _leave_out_metrics() -> None:
    """VLLM would collect statistics against the user's word, were there a stat logger of ours for them."""
    from minedraft.backends.vllm.plugin import without_metrics

    plugins = without_metrics(os.environ.get("VLLM_PLUGINS"))
    if plugins is not None:
        os.environ["VLLM_PLUGINS"] = plugins


def _summary(launch: Any) -> str:
    placement, settings = launch.placement, launch.settings
    parts = [f"mode {settings.mode}", f"target on {','.join(placement.target) or 'any core'}"]
    if settings.drafter is not None:
        k = launch.engine["speculative_config"]["num_speculative_tokens"]
        parts += [f"drafter {settings.drafter.engine['model']} on {','.join(placement.draft)}", f"k = {k}"]
    if placement.shared:
        parts.append(f"both use {','.join(placement.shared)}, so drafting can't overlap verification there")
    return "; ".join(parts)


def _run(args: Any) -> None:
    """Run vLLM's server in this process, as its own command does."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    cli_env_setup()
    configure_logging_from_args(args)
    command = ServeSubcommand()
    try:
        command.validate(args)
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from error
    try:
        if _is_plain(args):
            import uvloop

            uvloop.run(_serve(args))
        else:
            command.cmd(args)
    except (RuntimeError, ValueError, OSError) as error:
        raise CommandError(f"the server can't go on: {error} (what vLLM printed above says more)") from error


def _is_plain(args: Any) -> bool:
    """Whether this process alone is the server, so that vLLM's command would do no more than `_serve`."""
    return args.api_server_count in (None, 1) and not args.grpc and os.environ.get("VLLM_USE_RUST_FRONTEND", "0") == "0"


async def _serve(args: Any) -> None:
    """VLLM's `run_server`, but that a signal ends the start too.

    While the engines start, vLLM makes a KeyboardInterrupt of SIGTERM, asyncio keeps SIGINT for later, and vLLM's wait
    for the engines swallows a KeyboardInterrupt: the server would go on, or hang. A SystemExit gets through. Once the
    server is up it handles signals by itself.
    """
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.utils.system_utils import decorate_logs

    decorate_logs("APIServer", skip_if_decorated=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    listen_address, sock = setup_server(args, reuse_port=False)
    await run_server_worker(listen_address, sock, args)


def _end(number: int, _: Any) -> None:
    raise SystemExit(128 + number)
