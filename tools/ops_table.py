"""docs/ops.md: every op with its providers, what was measured, and the targets. `python -m tools.ops_table` writes it.

Belongs here: the layout of the page, the targets, which bench cases belong to which op. Does not belong here: reasons
for misses (docs/ops_notes.md, written by hand, included), times (bench/results/h200/ops.json), ops (the registry).
A test checks that the page is current. Nothing on it depends on the machine that writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.ops import providers, registry

ROOT = Path(__file__).resolve().parents[1]
PAGE, NOTES = ROOT / "docs" / "ops.md", ROOT / "docs" / "ops_notes.md"
RESULTS = ROOT / "bench" / "results" / "h200" / "ops.json"
Row = dict[str, Any]

CASES = {  # op -> bench cases (regular expression at the start of the name); default: the op's own name
    "attention": r"attn_(decode|prefill|window)/",
    "block_attention": r"attn_block/",
    "hc_boundary": r"mhc/",
    "index_topk": r"(index_topk|index_logits|topk)/",
    "index_topk_blocks": r"(index_topk_blocks|index_blocks|index_logits_blocks)/",
    "markov_step": r"markov/",
    "linear": r"linear/(lm_head|compressor|index_weights|router)/",
    "linear_dequant": r"linear/wo_a/",
    "linear_fp8": r"linear/(?!lm_head|compressor|index_weights|router|wo_a)",
    "vision_attention": r"(vision_attention|vision_tower)/",
}
HIDDEN = re.compile(r"_try|_tiles|tune|/warps|_plan|experts_(gate_up|down)")  # variants that a choice was made from
LIBRARY = re.compile(
    r"torch(?! \(references)|cublas|cudnn|deep_?gemm|flash|tile_?kernels|grouped_mm|sgl|index_select", re.I
)


TARGET = "4.28 TB/s and 794 TFLOP/s (bf16), as earlier measured on this GPU, whatever the run itself reached"
TARGET_RATES = {"bandwidth_gb_s": 4280.0, "matmul_tflop_s": 794.0, "fp8_tflop_s": 1454.0}  # that the targets mean


@dataclass(frozen=True)
class Target:
    """A number of issue 5. `value` reads it off a row; `at_most`: smaller is better."""

    case: str  # regular expression of the whole name
    text: str
    limit: float
    value: Callable[[Row], float | None]
    at_most: bool = False
    unit: str = "%"


def percent(row: Row) -> float | None:
    """Percent of floor at the rates that issue 5 names, not at those of the run."""
    if row.get("bound") == "bf16 flops" and "tflop_s" in row:
        return 100 * row["tflop_s"] / TARGET_RATES["matmul_tflop_s"]
    return row["percent_of_floor"] * row["rate_of_run"] if "percent_of_floor" in row else None


def microseconds(row: Row) -> float | None:
    return row.get("median_us")


def teraflops(row: Row) -> float | None:
    """As stored, else from percent of a FLOP floor."""
    if "tflop_s" in row or row.get("bound") != "bf16 flops":
        return row.get("tflop_s")
    return row["percent_of_floor"] / 100 * row["rate_of_run"] * TARGET_RATES["matmul_tflop_s"]


def against_deep_gemm(row: Row) -> float | None:
    """Our time over DeepGEMM's in the same run."""
    theirs = [us for name, us in (row.get("baselines") or {}).items() if re.search("deep_?gemm", name, re.I)]
    return row["median_us"] / min(theirs) if theirs else None


BIG = r"linear/(wq_b|wo_b|engram_wkv)/"
TARGETS = (
    Target(r"experts/T8", "experts, T = 8", 90, percent),
    Target(r"experts/T64", "experts, T = 64", 90, percent),
    Target(r"experts/T1", "experts, T = 1 (stretch: 85%)", 76, percent),
    Target(r"experts/T8192", "experts, T = 8192, of the FLOP floor", 55, percent),
    Target(BIG + "T1", "FP8 linears of 40 MB and more, M = 1", 80, percent),
    Target(BIG + "T8", "the same, M = 8", 72, percent),
    Target(BIG + "T64", "the same, M = 64", 62, percent),
    Target(BIG + "T(1|8|64)", "the same against DeepGEMM's 128-wide FP8", 1.1, against_deep_gemm, True, "x"),
    Target(BIG + "T8192", "the same, T = 8192", 75, percent),
    Target(r"attn_decode/R64/ctx32768", "sparse attention decode, 64 requests x 32k", 20, microseconds, True, "us"),
    Target(r"attn_decode/R256/ctx32768", "sparse attention decode, 256 rows, of the FLOP floor", 50, percent),
    Target(r"attn_prefill/T8192", "sparse attention prefill, 8192 rows", 400, teraflops, unit="TFLOP/s"),
    Target(r"index_logits/T(4096|8192)/slots1/\d+", "index logits, T >= 4096", 60, percent),
    Target(r"index_logits/T64/slots64/16384", "index logits, 64 rows x 16k", 40, percent),
    Target(r"topk/131072/T64", "top-512 of 131,072, 64 rows", 28, microseconds, True, "us"),
    Target(r"mhc/T1", "mHC boundary, T = 1, in at most two launches", 9, microseconds, True, "us"),
    Target(r"mhc/T512", "mHC boundary, T = 512", 65, percent),
    Target(r"mhc/T8192", "mHC boundary, T = 8192", 85, percent),
    Target(r"vision_tower/.*", "vision tower, one 1,000-token image, of the FLOP floor", 50, percent),
    Target(r"engram_gather/T512", "Engram gather, device table, T = 512", 50, percent),
    Target(r"engram_gather/pinned/T64", "Engram gather, pinned host table, T = 64", 15, microseconds, True, "us"),
)


def results() -> tuple[Row, list[Row]]:
    """(meta, rows) of the bench; empty when it was never run."""
    if not RESULTS.exists():
        return {}, []
    found = json.loads(RESULTS.read_text())
    meta = found["meta"]
    for row in found["rows"]:
        key = {"bytes": "bandwidth_gb_s", "fp8 flops": "fp8_tflop_s"}.get(row.get("bound", ""), "matmul_tflop_s")
        row["rate_of_run"] = meta[key] / TARGET_RATES[key]
    return meta, found["rows"]


def number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells) + "\n"


# --------------------------------------------------------------------------------------------------------- sections


def smaller(rows: list[Row]) -> str:
    """Linears too small for a share of the bandwidth: against a kernel that reads the same bytes and does nothing."""
    out = []
    for r in rows:
        if least := (r.get("baselines") or {}).get("read_only"):
            out.append((f"`{r['case']}`", number(r["median_us"]), number(least), f"{r['median_us'] / least:.2f}x"))
    head = ("case", "us", "read only us", "ratio")
    return f"Linears against a kernel that only reads the same bytes:\n\n{table(head, out)}" if out else ""


def targets(rows: list[Row]) -> str:
    unverified = {r["case"]: r["unverified"] for r in rows if "unverified" in r}  # timed, but its check failed
    earlier = {r["case"]: r["run"] for r in rows if "run" in r}
    out = []
    for t in TARGETS:
        wanted = f"{'<=' if t.at_most else '>='} {number(t.limit)} {t.unit}"
        found = [(r["case"], v) for r in rows if re.fullmatch(t.case, r["case"]) and (v := t.value(r)) is not None]
        if not found:
            out.append((t.text, wanted, "not measured", ""))
        for case, value in found:
            good = value <= t.limit if t.at_most else value >= t.limit
            away = 100 * abs(value - t.limit) / t.limit
            verdict = "met" if good else f"**missed by {max(away, 0.1):.2g}%**"
            if note := unverified.get(case):
                verdict = f"**not counted**: {note}"
            when = f", run of {earlier[case][:10]}" if case in earlier else ""
            out.append((t.text, wanted, f"{number(value)} {t.unit} (`{case}`{when})", verdict))
    return table(("target", "wanted", "measured", "verdict"), out)


def default(op: registry.Op, arch: str) -> str:
    """The provider that a machine of that architecture takes by itself."""
    device = "cuda" if arch.startswith("sm_") else arch
    preferred = {
        b.library
        for b in providers.bindings()
        if b.op == op.name and b.device == device and b.prefer and arch in {f"sm_{a}{c}" for a, c in b.measured}
    }
    for p in op.providers:
        if p.device == device and arch in p.states and (not p.only_if_asked or p.name in preferred):
            return p.name
    return "reference"


def provider_lines(op: registry.Op) -> Iterator[str]:
    reasons = {(b.library, b.device): b for b in providers.bindings() if b.op == op.name}
    for p in op.providers:
        if p.name == "reference":
            continue
        binding = reasons.get((p.name, p.device))
        if binding is not None and binding.always:
            yield f"not `{p.name}` ({p.device}): {binding.always}"
            continue
        text = f"`{p.name}` ({p.device}): {registry.state_text(p)}"
        if binding is not None:
            text += "".join(f"; {reason}" for reason in binding.refused.values())
            if not binding.prefer:
                seen = "; ".join(dict.fromkeys(binding.measured.values()))
                text += f"; only when asked for{': ' + seen if seen else ''}"
        elif p.only_if_asked:
            text += f"; only when asked for: {p.only_if_asked}"
        yield text


def op_section(op: registry.Op, rows: list[Row]) -> str:
    doc = " ".join((op.reference.__doc__ or "").split("\n\n")[0].split())
    chosen = ", ".join(f"{arch} `{default(op, arch)}`" for arch in ("cpu", "sm_90", "sm_100", "npu"))
    tolerance = "exact" if not op.tolerance else f"{op.tolerance:g} relative Frobenius"
    lines = [f"### {op.name}", "", doc, "", f"`{op.schema}`", "", f"Defaults: {chosen}. Tolerance: {tolerance}.", ""]
    lines += [f"- {line}" for line in provider_lines(op)]
    mine = [r for r in rows if re.match(CASES.get(op.name, rf"{op.name}/"), r["case"]) and not HIDDEN.search(r["case"])]
    if mine:
        lines += [
            "",
            table(("case", "us", "floor us", "% of floor", "bound", "best library"), [cells(r) for r in mine]),
        ]
    return "\n".join(lines).rstrip() + "\n"


def cells(row: Row) -> tuple[str, ...]:
    theirs = {k: v for k, v in (row.get("baselines") or {}).items() if LIBRARY.search(k)}
    best = min(theirs, key=lambda name: theirs[name], default=None)
    other = "" if best is None else f"{best}: {number(theirs[best])} us, {theirs[best] / row['median_us']:.2f}x"
    name = row["case"] if row.get("provider", "triton") == "triton" else f"{row['case']} ({row['provider']})"
    shown = (number(row["median_us"]), number(row["floor_us"]), f"{row['percent_of_floor']:.0f}")
    when = f" (run of {row['run'][:10]})" if "run" in row else ""
    return (f"`{name}`{when}", *shown, str(row.get("bound", "")), other)


INTRO = """# Ops

Made by `python -m tools.ops_table` from the op registry and `bench/results/h200/ops.json`; edit neither by hand. The
model is written over these ops and nothing else touches device code. What a machine takes and why:
`deepinfer doctor --ops --device cuda`. Another choice: `DEEPINFER_OPS=op=provider,...` ([env.md](env.md)).

How far a provider was seen on an architecture:

- *measured*: ran on that hardware, where its results equalled the reference within the tolerance; timed where a table
  says so. SM90 means one NVIDIA H200.
- *compiled, not run*: machine code for it is made in CI without a GPU (`make kernels`: tensor core instructions there,
  no spills). No SM100 device was at hand.
- *not run on hardware*: a library call checked against the library's recorded schema, and against the reference through
  a double of the library; or references on a device that nobody here has. A library is then no default.

"Best library" is the fastest of the alternatives timed in the same run; 2.00x means that it takes twice our time.
"""

HOW_TO = """## How to add

**An op.** In `deepinfer/ops/<family>.py`: `@define(schema, fake=, inputs=, cost=, tolerance=)` over the reference, a
plain torch function that runs on every device, computes in float32 (float64 where BLAS or vectorised functions would
make a row's bits depend on its batch) and rounds where the format says. `inputs` yields the shapes that break kernels
(`tests/ops/test_inputs.py` says which); `cost` gives FLOPs and bytes for the floors. `tests/ops/test_ops.py` then
checks schema, fake, mutation, row independence. Integers and codes are exact, floats have a relative tolerance.

**A kernel of ours.** Triton or Gluon: a function with the op's own signature in `deepinfer/ops/triton/<family>.py`, one
line in `KERNELS` of `deepinfer/ops/triton/__init__.py`, and every compiled form in the file's `VARIANTS` with the
instruction that its PTX must hold: `python -m deepinfer.ops.triton.compile --family X` compiles them for sm_90a and
sm_100a without a GPU, CI fails on a spill. CUDA C++: a kernel in `csrc/cuda` behind a C function, its caller in
`deepinfer/ops/native/cuda.py`. Weights in another order: `prepare_<op>` (same bytes, same shapes). No host sync,
outputs from `torch.empty`, capturable. Tests: Triton's interpreter (`tests/ops/test_triton_<family>.py`), then
`tests/gpu/check_<family>.py` on a GPU (`make gpu-test`, `ARGS=--sanitize` for compute-sanitizer) and a bench case in
`deepinfer/studies/kernels/<family>.py`.

**A library.** A `Binding` in `deepinfer/ops/providers/<library>.py`: the op, a function with the op's signature, the
architectures, the library's schema as text, and a probe that compares it with what is installed (`lacks_ops` for
`torch.ops`, `lacks_functions` for Python); never an import at module level, never a decision by name or version.
`tests/ops/test_providers.py` gets a double that is defined from the recorded text, decodes the library's layouts and
computes the reference. `measured` stays empty, and the library is taken only when asked for, until
`tests/gpu/check_providers.py` passed on that architecture; `prefer=True` makes it the default there, with the numbers.
"""


def page() -> str:
    """The whole page."""
    meta, rows = results()
    parts = [INTRO]
    if rows:
        rates = f"{meta['bandwidth_gb_s'] / 1e3:.2f} TB/s, {meta['matmul_tflop_s']:.0f} TFLOP/s bf16"
        fp8 = f", {meta['fp8_tflop_s']:.0f} TFLOP/s fp8" if "fp8_tflop_s" in meta else ""
        where = f"{meta['device']}, torch {meta['torch']}, triton {meta['triton']}, {meta['date'][:10]}"
        parts.append(f"Measured on {where}; floors from {rates}{fp8}, measured in the same run.\n")
    parts += ["## Targets\n", f"Percent here are of floors at {TARGET}.\n", targets(rows)]
    parts += [text] if (text := smaller(rows)) else []
    if NOTES.exists():
        parts.append(NOTES.read_text(encoding="utf-8").strip() + "\n")
    families = sorted({op.family for op in registry.OPS.values()})
    for family in families:
        parts.append(f"## {family}\n")
        parts += [op_section(op, rows) for op in registry.OPS.values() if op.family == family]
    return "\n".join([*parts, HOW_TO])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
