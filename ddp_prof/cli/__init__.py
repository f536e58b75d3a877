"""The command line: its commands, loaded when they are asked for; errors become exit codes only here."""

from __future__ import annotations

import errno
import os
import signal
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import click

from ddp_prof import __version__
from ddp_prof.cli.terminal import EXIT_CODE, VERBOSITY, say
from ddp_prof.errors import DdpProfError, NotMetError, printable

COMMANDS = {
    "capture": "ddp_prof.cli.capture",
    "summary": "ddp_prof.cli.tables",
    "overlap": "ddp_prof.cli.tables",
    "collectives": "ddp_prof.cli.tables",
    "critical": "ddp_prof.cli.tables",
    "doctor": "ddp_prof.cli.tables",
    "skew": "ddp_prof.cli.tables",
    "kernels": "ddp_prof.cli.tables",
    "compare": "ddp_prof.cli.tables",
    "check": "ddp_prof.cli.check",
    "timeline": "ddp_prof.cli.pages",
    "report": "ddp_prof.cli.pages",
    "export": "ddp_prof.cli.pages",
    "info": "ddp_prof.cli.tables",
    "results": "ddp_prof.cli.results",
    "mcp": "ddp_prof.cli.mcp",
    "completion": "ddp_prof.cli",
}
"""The commands in the order of the help, and the module of each."""


class NotMet(click.ClickException):
    """A run does not meet what was required of it."""

    exit_code = 3


ACTIONABLE = (DdpProfError, OSError, MemoryError, RecursionError)
"""Errors that a user can act on."""


def error_line(error: BaseException) -> str:
    """Format an error as one line; system errors name the file, if it is known."""
    words = str(error)
    if isinstance(error, MemoryError):
        words = "there is not enough memory: free some, take a larger machine, or leave steps of the capture out"
    elif isinstance(error, RecursionError):
        words = "something in the input is nested too deep"
    elif isinstance(error, OSError) and error.strerror:
        words = f"{error.filename}: {error.strerror}" if error.filename else f"cannot write ({error.strerror})"
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            words += ": make room there, or set TMPDIR where it is for temporary files"
    return printable(" ".join(words.split()))


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _is_path(argument: str) -> bool:
    """Whether it names a file or a folder, though perhaps one that is not there, or stdin."""
    if argument.startswith("-"):
        return argument == "-"
    is_like_one = os.sep in argument or argument.endswith((".nsys-rep", ".qdrep", ".sqlite", ".json", ".gz"))
    return is_like_one or Path(argument).exists()


class Commands(click.Group):
    """Loads a command's module when it is asked for, so that ``--help`` stays as fast as click itself."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command, with the options of all commands."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), cmd_name)
        command.params += [option for option in VERBOSITY if option not in command.params]
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Without arguments show the help; a path in place of a command means ``summary``."""
        if not args and not ctx.resilient_parsing:
            say(ctx.get_help())
            ctx.exit()
        if not COMMANDS.keys() & set(args) and any(map(_is_path, args)):
            args = ["summary", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The named command; an unknown name raises an error that suggests similar ones."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            alike = get_close_matches(args[0], COMMANDS)
            meant = f"did you mean {' or '.join(map(repr, alike))}?" if alike else f"there are {', '.join(COMMANDS)}"
            raise click.UsageError(f"no such command {printable(args[0])!r}: {meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each command with the whole first sentence of what it does."""
        found = [(name, command) for name in COMMANDS if (command := self.get_command(ctx, name))]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=500)) for name, command in found])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error that a user can act on is one line on stderr and exit code 1.

        Requirements that are not met are exit code 3; wrong usage is 2, by click itself. SIGTERM ends a command as
        Ctrl-C does, so that half-written files are removed.
        """
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            result = super().invoke(ctx)
        except KeyboardInterrupt as stop:
            number = signal.Signals(stop.args[0] if stop.args else signal.SIGINT)
            say(f"stopped by {number.name}; what was written before is complete", err=True)
            raise click.exceptions.Exit(128 + number) from None  # as shells have it
        except ACTIONABLE as error:
            if isinstance(error, BrokenPipeError):  # the reader of our output has seen enough: click ends quietly
                raise
            failure = NotMet if isinstance(error, NotMetError) else click.ClickException
            raise failure(error_line(error)) from error
        finally:
            signal.signal(signal.SIGTERM, before)
        if code := ctx.meta.get(EXIT_CODE):
            ctx.exit(code)
        return result


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ddp-prof")
def main() -> None:
    """How much of a training step's gradient communication hides behind the backward pass.

    Reads what Nsight Systems or torch.profiler recorded; needs neither torch nor a GPU.
    """


main.params += VERBOSITY


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """The script that lets a shell complete commands, options and files.

    \b
    bash: eval "$(ddp-prof completion bash)" in ~/.bashrc
    zsh: eval "$(ddp-prof completion zsh)" in ~/.zshrc
    fish: ddp-prof completion fish > ~/.config/fish/completions/ddp-prof.fish
    """  # noqa: D301
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    say(kind(main, {}, "ddp-prof", "_DDP_PROF_COMPLETE").source())
