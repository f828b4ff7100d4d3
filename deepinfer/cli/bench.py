"""`deepinfer bench`: the studies, for people who measure.

Belongs here: options. Does not belong here: measuring (studies/). torch is imported when a command runs.
"""

from __future__ import annotations

from pathlib import Path

import click

RESULTS = click.option(
    "--results", type=click.Path(path_type=Path), help="folder to write <kind>/<name>.json below; default: print only"
)


@click.group()
def bench() -> None:
    """Measure this machine: capture modes, whole steps, single ops. The last line of each is its JSON document."""


@bench.command()
@click.option("--model", default="tiny", show_default=True, help="name of a synthetic config")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda")
@click.option("--mode", "modes", multiple=True, help="eager, layer, model, graph; default: all that the device has")
@click.option("--rows", default=1, show_default=True, help="decode rows of a step")
@RESULTS
def capture(model: str, device: str, modes: tuple[str, ...], rows: int, results: Path | None) -> None:
    """Start and step time of every capture mode, each in a process of its own, with an empty and with a kept cache."""
    from deepinfer.studies import capture as study

    study.run(model, device, modes or None, rows, results)


@bench.command()
@click.option("--model", default="slice-12", show_default=True, help="name of a synthetic config")
@click.option("--mode", default="layer", show_default=True, type=click.Choice(["layer", "model", "graph"]))
@click.option("--rows", multiple=True, type=int, default=(1, 8, 64, 256), show_default=True, help="decode rows")
@click.option(
    "--context", multiple=True, type=int, default=(4096, 32768), show_default=True, help="tokens behind a row"
)
@click.option("--prefill", multiple=True, type=int, default=(8192,), show_default=True, help="rows of a prefill step")
@click.option("--trace", help="file for a Perfetto trace of the first prefill case")
@RESULTS
def step(
    model: str,
    mode: str,
    rows: tuple[int, ...],
    context: tuple[int, ...],
    prefill: tuple[int, ...],
    trace: str | None,
    results: Path | None,
) -> None:
    """Decode and prefill steps on a GPU against the bytes and FLOPs that they need, kernels by name."""
    from deepinfer.studies import step as study

    study.run("step", model, mode, rows, context, prefill, results, trace)  # type: ignore[arg-type]


@bench.command()
@click.option("--family", multiple=True, help="families of ops; default: all")
@click.option("--match", default="", help="only cases whose name contains this")
@RESULTS
def ops(family: tuple[str, ...], match: str, results: Path | None) -> None:
    """Every kernel against its floor on a GPU."""
    from deepinfer.studies.kernels import harness

    harness.run("ops", family or harness.FAMILIES, match, results)
