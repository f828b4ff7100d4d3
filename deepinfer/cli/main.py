"""The command group and the one place where exceptions become an exit code.

Exit codes: 0 done; 1 a check found something (`doctor`, `verify`), a request failed, or nobody reads the
output; 2 an error of ours or of the input; 130 interrupted. An error is one line on stderr (a list of
problems: one line each); DEEPINFER_LOG_LEVEL=debug shows the traceback.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
import warnings

import click

from deepinfer import __version__, envs
from deepinfer.cli.batch import run_batch
from deepinfer.cli.bench import bench
from deepinfer.cli.cache import cache
from deepinfer.cli.chat import chat
from deepinfer.cli.checkpoint import make_checkpoint, verify
from deepinfer.cli.doctor import doctor
from deepinfer.cli.generate import generate
from deepinfer.errors import DeepInferError

EXIT_FOUND = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="deepinfer %(version)s")
def cli() -> None:
    """Run DeepSeek-V4.1-Flash offline: generate, chat, process batch files, check an installation.

    Start with `deepinfer chat`, which talks with the small model that comes along, or with `deepinfer doctor`.
    `deepinfer make-checkpoint tiny DIR` writes random weights in the released format that every command takes.
    """


for command in (generate, chat, run_batch, make_checkpoint, verify, doctor, bench, cache):
    cli.add_command(command)


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit the process."""
    sys.exit(run(args))


def run(args: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. Separate from `main` for tests."""
    try:
        _set_up()
        code = cli.main(args, prog_name="deepinfer", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_ERROR
    except click.ClickException as error:
        where = getattr(error, "ctx", None)
        hint = f" (see {where.command_path} --help)" if where is not None else ""
        return _fail(error, error.format_message().rstrip(".") + hint)
    except DeepInferError as error:
        return _fail(error, str(error))
    except (KeyboardInterrupt, click.Abort) as error:
        return _fail(error, "interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        return EXIT_FOUND
    except OSError as error:
        name = error.filename or "the output"
        if error.errno in DISK_FULL:
            _drop_output()
            return _fail(error, f"disk full while writing {name}: free some space and run the command again")
        return _fail(error, f"{name}: {error.strerror or error}")


def _set_up() -> None:
    for sentence in envs.unknown():
        print(f"deepinfer: warning: {sentence}", file=sys.stderr)
    warnings.filterwarnings("ignore", message="DEEPINFER_", category=RuntimeWarning)  # said just now
    logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("deepinfer").setLevel(str(envs.get("DEEPINFER_LOG_LEVEL")).upper())


def _drop_output() -> None:
    """What is still buffered cannot be written: let the interpreter exit without another complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: BaseException, message: str, code: int = EXIT_ERROR) -> int:
    if os.environ.get("DEEPINFER_LOG_LEVEL", "").lower() == "debug":
        traceback.print_exception(error)
    print(f"deepinfer: error: {message}", file=sys.stderr)
    return code
