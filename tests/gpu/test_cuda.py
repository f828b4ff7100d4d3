"""The whole model on an NVIDIA GPU through the reference ops: golden arrays, and exact text equal to the CPU's.

Skipped without CUDA. `python tests/gpu/test_cuda.py` runs it where pytest is not installed.
"""

from __future__ import annotations

from pathlib import Path

import torch

TINY = Path(__file__).parents[1] / "data/tiny"

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
except ModuleNotFoundError:
    pass


def test_goldens_on_cuda() -> None:
    from deepinfer.verify import verify_checkpoint

    checks = list(verify_checkpoint(TINY, device="cuda"))
    failed = [f"{c.name} {c.metric} {c.value:.3g} limit {c.limit:.3g} {c.note}" for c in checks if c.verdict == "fail"]
    assert not failed, "\n".join(failed)
    assert sum(c.verdict == "pass" for c in checks) > 100


def test_text_equals_the_cpu() -> None:
    from deepinfer import LLM, SamplingParams

    texts = []
    for device in ("cpu", "cuda"):
        with LLM(str(TINY), device=device, numerics="exact", max_model_len=256) as llm:
            params = [SamplingParams(temperature=t, max_tokens=24, seed=5, ignore_eos=True) for t in (0.0, 0.7, 1.0)]
            outputs = llm.generate([[0, *range(20, 60 + 30 * i)] for i in range(3)], params, use_tqdm=False)
            texts.append([o.outputs[0].token_ids for o in outputs])
    assert texts[0] == texts[1]


if __name__ == "__main__":
    print("CUDA", torch.version.cuda, torch.cuda.get_device_name(), "torch", torch.__version__)
    for check in (test_goldens_on_cuda, test_text_equals_the_cpu):
        check()
        print("ok", check.__name__)
