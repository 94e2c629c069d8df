"""The Typer app and the one map from failures to exit codes."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import kvq
from kvq import console
from kvq.commands import calibrate, export, inspect, verify
from kvq.errors import KvqError

EXIT_CODES = (
    "Exit codes: 0 done (verify: holds), 1 verify: does not hold, 2 no answer possible, "
    "130 interrupted, 141 closed pipe."
)

app = typer.Typer(
    name="kvq",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (calibrate, export, inspect, verify):
    name = module.__name__.rpartition(".")[2]
    app.command(name, epilog=module.EXAMPLES)(getattr(module, name))


def _version(wanted: bool) -> None:
    if wanted:
        console.answer(kvq.__version__)
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show tracebacks of internal errors.")
    ] = False,
) -> None:
    """Calibrate, export, inspect and verify KV-cache quantization scales."""


def run(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Never raises."""
    arguments = list(argv)
    as_json = "--json" in arguments
    try:
        result = app(arguments, standalone_mode=True)
        sys.stdout.flush()
    except SystemExit as exit_:
        return _flushed(exit_.code if isinstance(exit_.code, int) else 0 if not exit_.code else 2)
    except KvqError as failure:
        if as_json:
            console.error_document(failure)
        console.error(failure)
        return failure.exit_code
    except KeyboardInterrupt:
        console.note("interrupted")
        return 130
    except BrokenPipeError:
        return _closed_pipe()
    except Exception as failure:
        return _internal(failure, as_json=as_json, verbose="-v" in arguments[:1])
    return int(result or 0)


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _closed_pipe()
    return code


def _closed_pipe() -> int:
    # the interpreter flushes stdout once more at exit; give it somewhere to go
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def _internal(failure: Exception, *, as_json: bool, verbose: bool) -> int:
    wrapped = KvqError(
        f"internal error: {type(failure).__name__}: {failure}",
        code="internal",
        hint="run `kvq -v …` for the traceback, and please report it",
    )
    if verbose:
        import traceback

        traceback.print_exception(failure)
    if as_json:
        console.error_document(wrapped)
    console.error(wrapped)
    return wrapped.exit_code


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))
