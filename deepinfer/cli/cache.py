"""`deepinfer cache`: compiled code on disk.

Belongs here: printing and asking. Does not belong here: what is kept (compile/artifacts.py). torch is imported when a
command runs.
"""

from __future__ import annotations

import time

import click


@click.group()
def cache() -> None:
    """Compiled code that is kept for the next start: list it, clear it."""


@cache.command()
def ls() -> None:
    """One line per folder of compiled code, the last used first."""
    from deepinfer.cache.groups import human
    from deepinfer.compile import artifacts

    found = artifacts.listed()
    for artifact in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(artifact.used))
        click.echo(f"{artifact.key}  {human(artifact.bytes):>10}  used {used}  {artifact.path}")
    click.echo(f"{len(found)} in {artifacts.root()}; at most {artifacts.FOLDERS} are kept")


@cache.command()
def clear() -> None:
    """Remove all compiled code; the next start compiles again."""
    from deepinfer.cache.groups import human
    from deepinfer.compile import artifacts

    click.echo(f"removed {human(artifacts.clear())} below {artifacts.root()}")
