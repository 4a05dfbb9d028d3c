"""`minedraft models`: the embedded models, and getting them."""

from __future__ import annotations

import typer

from minedraft.commands.errors import CommandError
from minedraft.commands.report import console
from minedraft.commands.torch_extra import torch_extra


def list_command() -> None:
    """Print a table of the embedded models."""
    from rich.table import Table

    from minedraft.backends.torch.models import list_models

    table = Table("Name", "Here", "What it is", "Folder")
    for model in list_models():
        table.add_row(model.name, "yes" if model.is_cached else "no", model.description, str(model.path))
    console().print(table)
    typer.echo(
        "Get one with `minedraft models get NAME`. A folder or a hub name (owner/model) works wherever a name does."
    )


def get_command(name: str) -> None:
    """Make a model unless it is there, and print its folder.

    Raises:
        CommandError: it can't be made.
    """
    from minedraft.backends.torch.errors import TorchWorldError
    from minedraft.backends.torch.models import resolve_model

    with torch_extra():
        try:
            folder = resolve_model(name, progress=lambda text: typer.echo(text, err=True))
        except TorchWorldError as error:
            raise CommandError(str(error)) from error
    typer.echo(folder)


def path_command(name: str) -> None:
    """Print the folder of a model that is there; makes nothing.

    Raises:
        CommandError: it isn't there.
    """
    from minedraft.backends.torch.models import list_models

    models = {model.name: model for model in list_models()}
    if name not in models:
        raise CommandError(f"no embedded model {name!r}; known are {', '.join(models)}")
    if not models[name].is_cached:
        raise CommandError(f"model {name!r} is not here yet; get it with `minedraft models get {name}`")
    typer.echo(str(models[name].path))
