"""The `vsim` command: each subcommand is one file in `commands/`, imported only when it is called."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

import click

from vsim import __version__
from vsim.errors import UserError

# Command name -> (module in vsim.commands, attribute, one line for `vsim --help`).
# The line stands here so that `vsim --help` imports no command, no numpy and no pandas.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "replay": ("replay", "replay", "Replay a trace through a simulated vLLM and report the tails."),
    "capacity": (
        "capacity",
        "capacity",
        "How many KV-cache blocks fit, term by term, as vLLM sizes them.",
    ),
    "preemption": (
        "preemption",
        "preemption",
        "SWAP or RECOMPUTE, block sizes and victims on your trace (V0).",
    ),
    "sweep": ("sweep", "sweep", "Many what-ifs of one trace, to one table; resumable."),
    "plan": ("plan", "plan", "The cheapest deployment that meets your SLOs."),
    "dualtrack": (
        "dualtrack",
        "dualtrack",
        "The offline benchmark beside the replay: the derating it needs.",
    ),
    "cache": ("cache", "cache", "What prefix caching can find in a trace, at best and really."),
    "trace": ("trace", "trace", "Inspect, convert and generate request traces."),
    "validate": ("validate", "validate", "Predict a real vLLM run and print the error."),
    "calibrate": ("calibrate", "calibrate", "Time real vLLM on this device and fit a step model."),
    "profiles": ("profiles", "profiles", "Look into calibration artifacts: origin and error."),
    "spotcheck": ("spotcheck", "spotcheck", "Check a prediction against the real engine, here."),
    "explain": ("explain", "explain", "Where the time went, of the tail or of one request."),
    "compare": ("compare", "compare", "Runs side by side; an exit code for CI gates."),
    "export": ("export", "export", "A run for Prometheus, Perfetto, a pull request, bench tools."),
    "debug": ("debug", "debug", "See what the scheduler decided, step by step."),
    "catalog": ("catalog", "catalog", "List the bundled GPUs, models and profiles, with sources."),
}


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(
            importlib.import_module(f"vsim.commands.{module}"), attribute
        )
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="vsim")
def vsim() -> None:
    """What will my vLLM's tail latency, throughput, KV-cache use and bill be if I change X?"""


def main() -> None:
    """Run `vsim`; bad input is one sentence on stderr and exit code 2."""
    try:
        # click gives the code of an Exit back instead of raising it; commands themselves return nothing.
        code = vsim.main(prog_name="vsim", standalone_mode=False)
        if sys.stdout is not None:  # closed by the shell (`>&-`)
            sys.stdout.flush()  # a full disk shows here, not in the last words of the interpreter
        if isinstance(code, int):
            sys.exit(code)
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        # A mistyped flag or value: click's own sentence, without the usage block's three lines.
        click.echo(f"error: {error.format_message()}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # `vsim ... | head` closed the pipe: not an error, and no traceback.
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        where = "the output" if error.filename is None else error.filename
        click.echo(f"error: {where}: {error.strerror or error}", err=True)
        _drop_stdout()
        sys.exit(2)


def _drop_stdout() -> None:
    """What stdout still holds cannot be written: let the interpreter not try again at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
