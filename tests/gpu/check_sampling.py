"""Sampling and acceptance kernels against their references on this GPU: `python tests/gpu/check_sampling.py [seed]`.

Ids are exact, so the references of real-size cases run on the GPU too (integer and IEEE arithmetic, one op at a time).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from harness import SMALL, Args, Checks, poison, raw, relative
from torch import Tensor

from deepinfer.ops import registry
from deepinfer.ops.acceptance import BLOCK, MATCH, TOKENWISE, accept_example
from deepinfer.ops.common import randn
from deepinfer.ops.sampling import STREAM_DRAFT, penalise_example, sampling_example

V = 2600 if SMALL else 129_280
ROWS = (1, 7) if SMALL else (1, 7, 33, 64, 257)
KINDS = ("gaussian", "flat", "peaked", "rounded", "equal", "two values")


@dataclasses.dataclass
class Rows:
    """Logits and parameters of `sample` on the GPU."""

    logits: Tensor
    params: tuple[Tensor, ...]
    who: tuple[Tensor, ...]


def rows_of(g: torch.Generator, m: int, kind: str) -> Rows:
    logits, *params = sampling_example(g, m, 50)
    gpu = torch.Generator("cuda").manual_seed(int(torch.randint(0, 1 << 30, (1,), generator=g)))
    logits = torch.randn((m, V), generator=gpu, device="cuda")
    if kind == "gaussian":
        logits *= 3
    elif kind == "peaked":
        logits = logits * 2 + 18 * torch.rand((m, V), generator=gpu, device="cuda") ** 200
    elif kind == "rounded":
        logits = (logits * 4).bfloat16().float()
    elif kind == "equal":
        logits = torch.zeros_like(logits)
    elif kind == "two values":
        logits = (logits > 2).float()
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (m,), generator=g)
    who = (seeds, torch.randint(0, 1 << 20, (m,), generator=g).int(), torch.randint(0, 4, (m,), generator=g).int())
    return Rows(logits, tuple(p.cuda() for p in params), tuple(w.cuda() for w in who))


def differ(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    return sum(float((raw(a) != raw(b)).any()) if a.shape == b.shape else 9.0 for a, b in zip(got, want, strict=True))


def real_filters(checks: Checks) -> None:
    from deepinfer.ops.triton import filters

    for kind in KINDS:
        m = 7 if kind in ("equal", "two values") else ROWS[-1] if kind == "flat" else 33

        def step(kind: str = kind, m: int = m) -> float:
            x = rows_of(checks.generator(), m, kind)
            poison()
            got = filters.survivors(x.logits, *x.params)
            return differ(got, registry.OPS["survivors"].reference(x.logits, *x.params))

        checks.case("survivors", f"{kind}/M{m}", 0.0, step)


def real_draws(checks: Checks) -> None:
    from deepinfer.ops.triton import sampling

    def ids(x: Rows, filtered: bool) -> tuple[Tensor, ...]:
        return sampling.sample(x.logits, *x.params, *x.who, None, 0, filtered, True)

    for m in ROWS:
        kind = KINDS[m % 4]
        for filtered in (True, False):

            def step(m: int = m, kind: str = kind, filtered: bool = filtered) -> float:
                x = rows_of(checks.generator(), m, kind)
                poison()
                got = ids(x, filtered)
                want = registry.OPS["sample"].reference(x.logits, *x.params, *x.who, None, 0, filtered, True)
                checks.say("sample", f"{kind}/M{m} logprobs", relative(got[1], want[1]), 1e-5)
                for r in {0, m // 2, m - 1}:
                    one = Rows(x.logits[r : r + 1], *(tuple(p[r : r + 1] for p in q) for q in (x.params, x.who)))
                    wrong = differ(ids(one, filtered), [g[r : r + 1] for g in got])
                    checks.say("sample", f"{kind}/M{m} row {r} alone", wrong, 0.0)
                return float((got[0] != want[0]).sum())

            checks.case("sample", f"{kind}/M{m}/{'filtered' if filtered else 'plain'}", 0.0, step)

    def exact_path() -> float:
        """Every draw through the float64 path."""
        x = rows_of(checks.generator(), 33, "gaussian")
        fast = ids(x, True)
        window, sampling.WINDOW = sampling.WINDOW, 1e9
        slow = ids(x, True)
        sampling.WINDOW = window
        return differ(fast, slow)

    checks.case("sample", "every draw in float64", 0.0, exact_path)

    def captured() -> float:
        x = rows_of(checks.generator(), 5, "gaussian")
        want = ids(x, True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = ids(x, True)
        for _ in range(3):
            graph.replay()
        return differ(got, want)

    checks.case("sample", "captured and replayed", 0.0, captured)


def real_others(checks: Checks) -> None:
    from deepinfer.ops.triton import penalties, sampling

    def penalise() -> float:
        args = penalise_example(checks.generator(), 7, V, 9, 300)
        mine = tuple(a.cuda() if isinstance(a, Tensor) else a for a in args)
        penalties.penalise(*mine)
        registry.OPS["penalise"].reference(*args)
        return float((raw(mine[0].cpu()) != raw(args[0])).sum())

    checks.case("penalise", "M7", 0.0, penalise)

    def top() -> float:
        x = rows_of(checks.generator(), 33, "rounded")
        given = torch.randint(0, V, (33,), device="cuda")
        got = sampling.top_logprobs(x.logits, given, 20)
        want = registry.OPS["top_logprobs"].reference(x.logits, given, 20)
        for i in (1, 2):
            checks.say("top_logprobs", f"values {i}", relative(got[i], want[i]), 1e-5)
        return differ((got[0], got[3]), (want[0], want[3]))

    checks.case("top_logprobs", "20 of M33", 0.0, top)


def real_markov(checks: Checks) -> None:
    from deepinfer.ops.triton import acceptance

    hidden = 64 if SMALL else 5120
    g = checks.generator()
    embed, head, weight = (randn(g, *s).cuda() for s in ((V, 256), (V, 256), (1, hidden + 256)))

    def step(b: int) -> float:
        x = rows_of(checks.generator(), b, "gaussian")
        block = torch.stack((x.logits, x.logits), 1)
        rows = block[:, 1]
        h = torch.randn((b, 2, hidden), device="cuda").bfloat16()[:, 1]
        previous = torch.randint(0, V, (b,), device="cuda")
        tail = (embed, head, weight, x.params[0], *x.who, STREAM_DRAFT)
        poison()
        ids, confidence = acceptance.markov_step(rows, h, previous, *tail)
        want = x.logits + embed[previous].float() @ head.float().t()
        none = torch.zeros_like(x.params[1])
        plain = (rows.contiguous(), x.params[0], none, none.double(), x.params[0], *x.who, None, STREAM_DRAFT)
        drawn, _ = registry.OPS["sample"].reference(*plain, False, False)
        joint = torch.cat((h.float(), embed[previous].float()), 1)
        checks.say("markov_step", f"B{b} logits", relative(rows.contiguous(), want), 1e-3)
        checks.say("markov_step", f"B{b} confidence", relative(confidence, joint @ weight.float()[0]), 1e-3)
        checks.say("markov_step", f"B{b} other rows", float((block[:, 0] != x.logits).sum()), 0.0)
        alone = x.logits[-1:].clone()
        one = acceptance.markov_step(
            alone, h[-1:], previous[-1:], embed, head, weight, x.params[0][-1:], *(w[-1:] for w in x.who), STREAM_DRAFT
        )  # fmt: skip
        wrong = differ((alone, *one), (rows[-1:], ids[-1:], confidence[-1:]))
        checks.say("markov_step", f"B{b} last row alone", wrong, 0.0)
        return float((ids != drawn).sum())

    for b in ROWS:
        checks.case("markov_step", f"B{b} ids from its own logits", 0.0, lambda b=b: step(b))


def real_accept(checks: Checks) -> None:
    from deepinfer.ops.triton import acceptance

    def cut(args: Args, r: int) -> Args:
        a, b = int(args[0][r]), int(args[0][r + 1])
        per_row = (p[a:b] for p in args[4:11])
        q = None if args[3] is None else args[3][r : r + 1]
        return ((args[0][r : r + 2] - a).contiguous(), args[1][a:b], args[2][r : r + 1], q, *per_row, *args[11:])

    for rule in (MATCH, TOKENWISE, BLOCK):
        for r in (1, 5):
            for filtered in (True, False):

                def step(rule: int = rule, r: int = r, filtered: bool = filtered) -> float:
                    mine = (*accept_example(checks.generator(), r, V, 5, rule, 0.7, "cuda")[:-1], filtered)
                    poison()
                    got = acceptance.accept(*mine)
                    for i in (0, r - 1):
                        alone = acceptance.accept(*cut(mine, i))
                        wrong = differ(alone, [x[i : i + 1] for x in got])
                        checks.say("accept", f"rule{rule}/R{r} {i} alone", wrong, 0.0)
                    print(f"     accepted {got[0].tolist()} of {(mine[0].diff() - 1).tolist()}")
                    return differ(got, registry.OPS["accept"].reference(*mine))

                checks.case("accept", f"rule{rule}/R{r}/filtered{filtered}", 0.0, step)


def main() -> None:
    checks = Checks("sampling")
    checks.examples("penalise", "record_prompt", "record_output")
    checks.examples("sample", rows=(0, 1, 2, 3, 4, 5, 6, 7, 8))
    if SMALL:  # other sizes compile other kernels: the real ones below say as much in half the time
        checks.examples("accept")
        checks.examples("survivors", rows=(0, 1, 2, 3, 4))
        checks.examples("top_logprobs", rows=(0, 1))
        checks.examples("markov_step", limits={0: 0.0})
    for part in (real_filters, real_draws, real_others, real_markov, real_accept):
        checks.attempt(part.__name__, "", lambda part=part: part(checks))
    checks.finish()


if __name__ == "__main__":
    main()
