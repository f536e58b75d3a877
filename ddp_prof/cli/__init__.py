"""The command line: one command a file, and the only place where an error becomes an exit code."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from ddp_prof import __version__
from ddp_prof.errors import DdpProfError, NotMetError
from ddp_prof.printable import printable

EXIT_CODE = "ddp_prof.exit_code"
"""Key in click's context of an exit code other than 0 for a command that ran to its end."""
COMMANDS = ("overlap", "collectives", "skew", "compare", "check", "timeline", "report", "export", "info", "results")


class NotMet(click.ClickException):
    """A run does not meet what was required of it."""

    exit_code = 3


class Commands(click.Group):
    """Loads a command's module when it is asked for, so that ``--help`` stays as fast as click itself."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The commands in the order in which a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of a file of this package."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"ddp_prof.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error that a user can act on is one line on stderr and exit code 1.

        Requirements that are not met are exit code 3; wrong usage is 2, by click itself.
        """
        try:
            result = super().invoke(ctx)
        except (DdpProfError, OSError) as error:
            if isinstance(error, BrokenPipeError):  # the reader of our output has seen enough: click ends quietly
                raise
            failure = NotMet if isinstance(error, NotMetError) else click.ClickException
            raise failure(printable(" ".join(str(error).split()))) from error
        if code := ctx.meta.get(EXIT_CODE):
            ctx.exit(code)
        return result


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ddp-prof")
def main() -> None:
    """How much of a training step's gradient communication hides behind the backward pass.

    Reads what Nsight Systems or torch.profiler recorded; needs neither torch nor a GPU.
    """
