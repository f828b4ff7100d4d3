"""Host time of a step (planning and results) without a model: `python bench/scheduler.py --requests 512`.

The study is deepinfer/studies/engine.py; results go to bench/results/cpu/scheduler.json.
"""

import argparse
from pathlib import Path

from deepinfer.studies import engine

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=512, help="running requests")
    engine.scheduler_main(parser.parse_args().requests, Path(__file__).parent / "results")
