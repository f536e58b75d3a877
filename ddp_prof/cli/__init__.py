"""The command-line interface. A command's module is imported on first use; only here do errors become exit codes."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import click

from ddp_prof import __version__
from ddp_prof.cli.terminal import EXIT_CODE, VERBOSITY, ClosedStream, complete_file, say, say_lines
from ddp_prof.errors import MAY_LACK_MEMORY, MORE_MEMORY, DdpProfError, UsageError, lacks_memory, printable
from ddp_prof.file_kinds import PACKED_SUFFIXES
from ddp_prof.signals import Interruption, handle_signals, handle_stopping, ignore_stopping

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = {
    "capture": "ddp_prof.cli.capture",
    "tune": "ddp_prof.cli.tune",
    "monitor": "ddp_prof.cli.monitor",
    "summary": "ddp_prof.cli.tables",
    "overlap": "ddp_prof.cli.tables",
    "collectives": "ddp_prof.cli.tables",
    "critical": "ddp_prof.cli.tables",
    "doctor": "ddp_prof.cli.tables",
    "skew": "ddp_prof.cli.tables",
    "kernels": "ddp_prof.cli.tables",
    "compare": "ddp_prof.cli.tables",
    "whatif": "ddp_prof.cli.whatif",
    "check": "ddp_prof.cli.check",
    "timeline": "ddp_prof.cli.pages",
    "report": "ddp_prof.cli.pages",
    "export": "ddp_prof.cli.pages",
    "info": "ddp_prof.cli.tables",
    "results": "ddp_prof.cli.tables",
    "cache": "ddp_prof.cli.cache",
    "mcp": "ddp_prof.cli.mcp",
    "completion": "ddp_prof.cli",
}
"""The module of each command, in the order of the help."""


ACTIONABLE = (DdpProfError, OSError, MemoryError, RecursionError)
"""Errors that a user can act on: they are shown as one line, without a traceback."""


def error_line(error: BaseException) -> str:
    """Return an error as one line, with the name of the file if the system reports it."""
    words = str(error)
    if lacks_memory(error):
        words = f"there is not enough memory: {MORE_MEMORY}"
    elif isinstance(error, RecursionError):
        words = "something in the input is nested too deep"
    elif isinstance(error, OSError) and error.strerror:
        # Without a name it may be any open file that was read or written, but only writing finds no room.
        finds_no_room = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
        nameless = "the output or a temporary file" if finds_no_room else "reading or writing failed"
        words = f"{error.filename or nameless}: {error.strerror}"
        if finds_no_room:
            is_output = error.filename is not None and not _is_temporary(str(error.filename))
            elsewhere = "write to another place" if is_output else "set TMPDIR to another folder for temporary files"
            words += f": make room there, or {elsewhere}"
    return printable(" ".join(words.split()))


def _is_temporary(file: str) -> bool:
    """Whether a file lies in the folder for temporary files; also if there is none with room."""
    try:
        return Path(file).is_relative_to(gettempdir())
    except FileNotFoundError:
        return True


def _is_path(argument: str) -> bool:
    """Whether an argument is a trace: ``-`` (stdin), what looks like a path, or what exists."""
    if argument.startswith("-"):
        return argument == "-"
    looks_like_path = os.sep in argument or argument.endswith((*PACKED_SUFFIXES, ".sqlite", ".json"))
    return looks_like_path or os.path.lexists(argument)


_OBJECTS_PER_SEARCH = 100_000
"""New objects after which the garbage collector searches for cycles. By default (700) the searches take a tenth of the
time of a command, whose objects live to its end and are in no cycles."""


class _WrongUsage(click.ClickException):
    """Wrong usage that shows only with the data, such as an unknown column: one line, without the command's usage."""

    exit_code = UsageError.exit_code


class Commands(click.Group):
    """The program's group of commands. A command's module is imported on first use, so that ``--help`` is fast."""

    is_program = True
    """Whether this process is ``ddp-prof``, and not a program that runs a command, such as a test."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the program. Characters that the terminal lacks become question marks; streams may be closed."""
        self.is_program = not args and extra.get("args") is None  # which takes the arguments from sys.argv
        if self.is_program:
            gc.set_threshold(_OBJECTS_PER_SEARCH)
        sys.stdout, sys.stderr = (stream or ClosedStream() for stream in (sys.stdout, sys.stderr))
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        try:
            return super().main(*args, **extra)
        finally:
            if self.is_program:
                gc.freeze()  # else Python searches all objects for cycles before the process ends

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return a command, with the options of verbosity; ``None`` for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), cmd_name)
        command.params += [option for option in VERBOSITY if option not in command.params]
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Let the shell complete a command or an option; else a file, as the traces need no command."""
        return super().shell_complete(ctx, incomplete) or complete_file(ctx, None, incomplete)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Show the help if there are no arguments; run ``summary`` if there is a path but no command.

        A first word that is neither a command nor a path is taken for a misspelled command, not for a missing trace.
        """
        if not args and not ctx.resilient_parsing:
            say_lines(ctx.get_help())
            ctx.exit()
        # The first word that is no option of verbosity.
        first = next((arg for arg in args if arg not in {"-q", "--quiet", "-v", "--verbose"}), "-")
        is_option = first.startswith("-") and first != "-"
        if not COMMANDS.keys() & set(args) and any(map(_is_path, args)) and (is_option or _is_path(first)):
            args = ["summary", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the named command; the error for an unknown name suggests similar names."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            if args[0] == "help":
                known = next((word for word in args[1:] if word in COMMANDS), None)
                raise click.UsageError(f"give --help: 'ddp-prof {known + ' ' if known else ''}--help'", ctx)
            named = next((word for word in args[1:] if word in COMMANDS), None)
            if named and _is_path(args[0]):
                raise click.UsageError(f"the command comes first: 'ddp-prof {named} {printable(args[0])}'", ctx)
            alike = get_close_matches(args[0], COMMANDS)
            meant = f"did you mean {' or '.join(map(repr, alike))}?" if alike else f"there are {', '.join(COMMANDS)}"
            neither = "" if os.path.lexists(args[0]) else ", and no file or folder of that name"
            raise click.UsageError(f"no such command {printable(args[0])!r}{neither}: {meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with the whole first sentence of its help, which click would cut."""
        commands = [(name, command) for name in COMMANDS if (command := self.get_command(ctx, name))]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=500)) for name, command in commands])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error that a user can act on becomes one line on stderr and exit code 1.

        Exit code 3 means that a requirement is not met; 2 is wrong usage, as for click. SIGTERM and SIGHUP end a
        command as Ctrl-C does, so that half-written files are removed. Where another program runs the command, the
        signal is for that program, too. Signals that are ignored stay ignored.
        """
        interruption = Interruption()
        before = handle_stopping(interruption.handle)
        try:
            result = super().invoke(ctx)
            if interruption.number:  # Python has lost the exception
                raise KeyboardInterrupt(interruption.number)
        except KeyboardInterrupt as stop:
            number = signal.Signals(stop.args[0] if stop.args else signal.SIGINT)
            say(f"stopped by {number.name}; what was written before is complete", err=True)
            if self.is_program:
                before = {}
                ignore_stopping()
            elif number != signal.SIGINT:
                handle_signals(before)
                signal.raise_signal(number)
            raise click.exceptions.Exit(128 + number) from None  # the convention of shells
        except (*ACTIONABLE, *MAY_LACK_MEMORY) as error:
            if isinstance(error, BrokenPipeError):  # the reader of our output has closed it: click ends silently
                raise
            if not isinstance(error, ACTIONABLE) and not lacks_memory(error):
                raise
            failure = _WrongUsage if isinstance(error, UsageError) else click.ClickException
            raise failure(error_line(error)) from error
        finally:
            handle_signals(before)
        if code := ctx.meta.get(EXIT_CODE):
            ctx.exit(code)
        if code is None and isinstance(sys.stdout, ClosedStream) and sys.stdout.has_lost:
            raise click.ClickException("stdout is closed, so the answer is lost: send it to a file, or to /dev/null")
        return result


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ddp-prof")
def main() -> None:
    """How much of a training step's gradient communication hides behind the backward pass.

    Reads what Nsight Systems or torch.profiler recorded; needs neither torch nor a GPU. Begin with 'ddp-prof TRACE...',
    or with 'ddp-prof capture -- ' and the command that starts your training.
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
    say_lines(kind(main, {}, "ddp-prof", "_DDP_PROF_COMPLETE").source())
