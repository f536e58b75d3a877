"""``ddp-prof completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """The script that lets a shell complete commands, options and files.

    \b
    bash: eval "$(ddp-prof completion bash)" in ~/.bashrc
    zsh: eval "$(ddp-prof completion zsh)" in ~/.zshrc
    fish: ddp-prof completion fish > ~/.config/fish/completions/ddp-prof.fish
    """  # noqa: D301
    from ddp_prof.cli import main

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "ddp-prof", "_DDP_PROF_COMPLETE").source())
