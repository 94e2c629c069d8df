"""The Typer app and the one map from failures to exit codes."""

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer

import kvq
from kvq import console
from kvq.commands import calibrate, export, inspect, merge, verify
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
for module in (calibrate, merge, export, inspect, verify):
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
    """Calibrate, merge, export, inspect and verify KV-cache quantization scales."""


def run(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Never raises."""
    arguments = list(argv)
    as_json = "--json" in arguments or "--report=json" in arguments
    as_json |= ("--report", "json") in pairwise(arguments)
    try:
        code = int(app(arguments, prog_name="kvq", standalone_mode=False) or 0)
        sys.stdout.flush()
    except KvqError as failure:
        if failure.repeated:
            return failure.exit_code
        if as_json:
            console.error_document(failure)
        console.error(failure)
        return failure.exit_code
    except (KeyboardInterrupt, typer.Abort):
        console.note("interrupted")
        return 130
    except BrokenPipeError:
        return _closed_pipe()
    except SystemExit as exited:  # Typer's own answer to a closed pipe, which would read as 1
        if isinstance(exited.__context__, BrokenPipeError):
            return _closed_pipe()
        return exited.code if isinstance(exited.code, int) else KvqError.exit_code
    except Exception as failure:
        if hasattr(failure, "show") and hasattr(failure, "format_message"):
            return _usage(failure, as_json=as_json)
        verbose = bool({"-v", "--verbose"} & set(arguments[:1]))
        return _internal(failure, as_json=as_json, verbose=verbose)
    return code


def _usage(failure: Any, *, as_json: bool) -> int:
    """Show a usage error; Typer keeps its class to itself, so it is known by its methods."""
    failure.show()
    if as_json:
        console.error_document(KvqError(failure.format_message(), code="usage"))
    return KvqError.exit_code


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
