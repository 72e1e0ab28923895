"""`main`: parse, run one sub-command, and turn what went wrong into one line and an exit code."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from specround.cli.bench import add_parser as add_bench
from specround.cli.demo import add_parser as add_demo
from specround.cli.export import add_parser as add_export
from specround.cli.fetch import add_parser as add_fetch
from specround.cli.generate import add_parser as add_generate
from specround.cli.models import add_parser as add_models
from specround.cli.parser import Parser, UsageError
from specround.cli.vllm import add_parser as add_vllm
from specround.cli.wait_policy import choose_wait_policy
from specround.contract.errors import ConfigError, ModelError, SpecRoundError
from specround.version import __version__

OK, FAILURE, USAGE, INTERRUPTED = 0, 1, 2, 130

_MODEL_SETTINGS = ("model", "dtype", "quantization", "DIRECTORY")

_DESCRIPTION = """\
Speculative decoding in which a speculator owns the whole round: which tokens to verify, which to keep, how many.

examples:
  specround fetch smollm2
  specround generate --prompt "The capital of France is" --max-tokens 16
  specround generate --prompt "1 2 3 1 2 3 1 2" --show-rounds \\
      --speculative-config '{"method": "suffix_tree", "num_speculative_tokens": 12}'
  specround models
  specround bench --per-kind 1
"""
_EPILOG = """\
exit codes: 0 done; 2 the command line or a setting is wrong, such as a model that is not there or a value that does
not fit the model; 1 anything else failed, such as a download or a broken file; 130 interrupted.
`specround COMMAND --help` explains a command.
"""


def build_parser() -> Parser:
    """The parser of every sub-command; importing it loads neither torch nor transformers."""
    parser = Parser(prog="specround", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"specround {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_command in (add_generate, add_models, add_fetch, add_export, add_demo, add_bench, add_vllm):
        add_command(commands).add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None = those of the process.

    Returns:
        The exit code: 0 ok, 2 usage, 1 failure, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    choose_wait_policy()
    if not _prepare_streams():
        return _fail("stdout is closed", FAILURE, debug=False)
    try:
        parsed = build_parser().parse_args(arguments)
        run: Callable[[object], int] = parsed.run
        code = run(parsed)
        sys.stdout.flush()
        return code
    except SystemExit as finished:  # --help and --version
        return finished.code if isinstance(finished.code, int) else OK
    except BrokenPipeError:
        _silence_stdout()
        return FAILURE
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED, "--debug" in arguments)
    except (UsageError, ConfigError) as error:
        return _fail(str(error), USAGE, "--debug" in arguments)
    except SpecRoundError as error:
        code = USAGE if _is_wrong_setting(error) else FAILURE
        return _fail(str(error), code, "--debug" in arguments)
    except OSError as error:  # for example a full disk
        _flush_or_silence()
        return _fail(f"{type(error).__name__}: {error}", FAILURE, "--debug" in arguments)
    except Exception as error:  # a bug, or something the system refused: still one line
        return _fail(f"{type(error).__name__}: {error}", FAILURE, "--debug" in arguments)


def _prepare_streams() -> bool:
    """Make streams that lose no text; whether there is a stdout.

    What the encoding of stdout cannot express is written as an escape. Python sets a stream to None when the process
    starts without it; messages for a missing stderr go nowhere.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    if sys.stdout is None:
        return False
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return True


def _is_wrong_setting(error: SpecRoundError) -> bool:
    """Whether a model was refused for what the user wrote: its name, its dtype or its quantization.

    An error with a cause is the system's or the network's: the name may be right.
    """
    return isinstance(error, ModelError) and error.field in _MODEL_SETTINGS and error.__cause__ is None


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"specround: error: {' '.join(message.split())}\n")
    return code


def _flush_or_silence() -> None:
    """Write what stdout still holds; if it takes nothing any more, the interpreter must not try again."""
    try:
        sys.stdout.flush()
    except OSError:
        _silence_stdout()


def _silence_stdout() -> None:
    """Whoever read the output is gone; keep the interpreter from complaining when it flushes."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # the stream has no descriptor
        return
