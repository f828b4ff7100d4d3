"""`deepinfer doctor`: the facts of deepinfer/doctor.py for a person, or as JSON."""

from __future__ import annotations

import json
from typing import Any

import click

from deepinfer.cli.options import Command

NO_FORM = "no form for this"  # deepinfer.ops.registry.NO_FORM, without importing torch for --help
MARKS = {"ok": "ok  ", "missing": "MISS", "optional": "-   "}


@click.command(cls=Command, short_help="Check this machine.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda", "npu"]),
    default="cpu",
    show_default=True,
    help="check what this device needs",
)
@click.option("--ops", is_flag=True, help="list every op: its provider on each device, and why on this one")
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
    for line in _op_lines(found["ops"], ops, device):
        click.echo(f"  {line}")
    return 0 if found["ok"] else 1


def _op_lines(table: list[dict[str, Any]], full: bool, device: str) -> list[str]:
    """A line per op with the provider of each device, then the reasons on `device` (`full`); or counts."""
    if not table:
        return ["none: the ops could not be loaded"]
    if not full:
        lines = []
        for name in dict.fromkeys(row["device"] for row in table):
            taken = [row["provider"] for row in table if row["device"] == name and row["chosen"]]
            counts = ", ".join(f"{taken.count(provider)} {provider}" for provider in dict.fromkeys(taken))
            lines.append(f"{name:5}{len(taken)} ops: {counts}")
        return [*lines, "--ops lists them with the reasons"]
    lines, width = [], max(len(row["op"]) for row in table)
    for op in dict.fromkeys(row["op"] for row in table):
        rows = [row for row in table if row["op"] == op]
        lines.append(f"{op:{width}}  " + ", ".join(f"{r['device']} {r['provider']}" for r in rows if r["chosen"]))
        for row in (row for row in rows if row["device"] == device):
            why = row["why"] if row["state"] == NO_FORM else f"{row['why']} ({row['state']})"
            lines.append(f"    {'' if row['chosen'] else 'not '}{row['provider']}: {why}")
    return lines
