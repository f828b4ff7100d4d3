"""`deepinfer make-checkpoint` and `deepinfer verify`."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer.cli.options import Command
from deepinfer.errors import CheckpointError

if TYPE_CHECKING:
    from deepinfer.verify.rules import Check


@click.command(cls=Command, name="make-checkpoint", short_help="Write a synthetic checkpoint.")
@click.argument("name")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@click.option("--seed", default=0, show_default=True, help="of the random weights")
@click.option(
    "--tokenizer",
    metavar="DIR",
    type=click.Path(exists=True),
    help="folder whose tokenizer.json is copied (the tiny checkpoints bring their own)",
)
def make_checkpoint(name: str, folder: str, seed: int, tokenizer: str | None) -> None:
    """Write a synthetic checkpoint: random weights in the released format.

    NAME is tiny (7 MB), tiny-realdims (17 MB), unit-4 (30.9 GiB), slice-12-e64 (33.2 GiB) or slice-12
    (105.5 GiB).
    """
    if Path(folder).is_dir() and any(Path(folder).iterdir()):
        raise CheckpointError(f"{folder} is not empty; name a new folder, or empty it first")
    from deepinfer.model.synthetic import make_checkpoint as write

    write(name, folder, seed, tokenizer=tokenizer)
    click.echo(f"wrote {name} to {folder}")


@click.command(cls=Command, short_help="Compare with golden arrays.")
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.option("--device", default="cpu", show_default=True, metavar="DEVICE", help="cpu, cuda:N or npu:N")
@click.option("--failures", is_flag=True, help="print only the arrays that fail")
@click.option("--json", "as_json", is_flag=True, help="print every array as one JSON document")
def verify(folder: str, device: str, failures: bool, as_json: bool) -> int:
    """Recompute every golden array of a folder and compare it by the tolerance table.

    A line gives the array, its metric with the limit, the largest absolute and the relative Frobenius error.
    Exit code 1 when any array fails.
    """
    from deepinfer.verify import verify as compare

    counts = {"pass": 0, "fail": 0, "skip": 0}
    rows = []
    for checkpoint, check in compare(folder, device=device):
        counts[check.verdict] += 1
        if as_json:
            rows.append({"checkpoint": checkpoint, **asdict(check)})
        elif check.verdict == "fail" or not failures:
            click.echo(_line(checkpoint, check))
    if as_json:
        click.echo(json.dumps({"checks": [_finite(row) for row in rows], "counts": counts}, allow_nan=False))
    else:
        click.echo(f"{counts['pass']} arrays pass, {counts['fail']} fail, {counts['skip']} are skipped")
    return 1 if counts["fail"] else 0


def _line(checkpoint: str, check: Check) -> str:
    name = f"{check.verdict:5}{checkpoint + '/' + check.name:48}"
    if check.verdict == "skip":
        return f"{name} {check.note}"
    numbers = f"{check.metric:10} {check.value:9.2e} (limit {check.limit:.0e})"
    return f"{name} {numbers}  max abs {check.max_abs:.1e}  rel {check.frobenius:.1e}  {check.note}".rstrip()


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()}
