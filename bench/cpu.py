"""Speed on this CPU against Hugging Face transformers and against the reference ops: `python bench/cpu.py`.

The study is deepinfer/studies/cpu.py; results go to bench/results/cpu/cpu.json.
"""

from pathlib import Path

from deepinfer.studies import cpu

if __name__ == "__main__":
    cpu.main(results=Path(__file__).parent / "results")
