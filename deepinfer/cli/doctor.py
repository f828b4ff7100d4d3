"""`deepinfer doctor`: the facts of deepinfer/doctor.py for a person, or as JSON."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import click

from deepinfer.cli.options import Command

MARKS = {"ok": "ok  ", "missing": "MISS", "optional": "-   "}


@click.command(cls=Command, short_help="Check this machine.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda", "npu"]),
    default="cpu",
    show_default=True,
    help="check what this device needs",
)
@click.option("--ops", is_flag=True, help="list every op with its providers instead of a summary")
@click.option("--json", "as_json", is_flag=True, help="print everything as one JSON document")
def doctor(device: str, ops: bool, as_json: bool) -> int:
    """Check this machine: system, packages, compilers, devices, ops.

    Exit code 1 when something that the device needs is missing.
    """
    from deepinfer import doctor as facts

    found = facts.report(device)
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False, indent=2))
        return 0 if found["ok"] else 1
    click.echo(f"DeepInfer {found['deepinfer']} for {device}: {facts.DEVICES[device]}")
    for name, value in found["system"].items():
        click.echo(f"  {name:8}{value}")
    click.echo("\nChecks")
    width = max(len(check["name"]) for check in found["checks"])
    for check in found["checks"]:
        line = f"  {MARKS[check['state']]} {check['name']:{width}}  {check['found']}  (needs {check['needed']})"
        click.echo(line.replace("needs optional", "optional"))
        if check["remedy"]:
            click.echo(f"       {'':{width}}  -> {check['remedy']}")
    click.echo("\nDevices that torch sees")
    for kind, names in found["devices"].items():
        click.echo(f"  {kind:5}{'; '.join(names)}")
    click.echo("\nOps")
    for line in _op_lines(found["ops"], ops):
        click.echo(f"  {line}")
    return 0 if found["ok"] else 1


def _op_lines(table: list[dict[str, Any]], full: bool) -> list[str]:
    if not table:
        return ["none: the ops could not be loaded"]
    if full:
        return [f"{row['device']:5}{row['op']:32}{row['provider']:12}{row['state']}" for row in table]
    lines = []
    for device, rows in groupby(sorted(table, key=lambda row: row["device"]), key=lambda row: row["device"]):
        chosen = [row["provider"] for row in rows if row["state"] == "chosen"]
        counts = ", ".join(f"{chosen.count(name)} {name}" for name in dict.fromkeys(chosen))
        lines.append(f"{device:5}{len(chosen)} ops: {counts}")
    return lines
