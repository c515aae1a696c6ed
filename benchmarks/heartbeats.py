"""How late the heartbeats of ranks are while they compute.

    python benchmarks/heartbeats.py [--ranks 2] [--steps 40] [--tokens 512]

A whole job in one pipeline, with a process for each rank. Each executor beats from the event loop
that also queues the work of its compute thread, so a beat is late when that thread holds the
interpreter's lock or the machine has no core left: give each rank one. The figures are the last
lines of the ranks' logs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

JOB = """
[job]
name = "heartbeats"
steps = {steps}
runs_dir = "{folder}"
detect_within_s = 0.1
[model]
hidden_size = 256
num_hidden_layers = {layers}
num_attention_heads = 8
num_key_value_heads = 8
intermediate_size = 688
vocab_size = 272
[parallel]
pp = {ranks}
schedule = "zb-h1"
[batch]
microbatches = 8
tokens = {tokens}
"""


def main() -> int:
    """Run the job and print what its ranks say."""
    parser = argparse.ArgumentParser(description="How late heartbeats are during compute")
    parser.add_argument(
        "--ranks", type=int, default=2, help="stages of the pipeline (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=40, help="iterations (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=512, help="of a micro-batch (default: %(default)s)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        sizes = vars(args) | {"layers": 4 * args.ranks, "folder": folder}
        job.write_text(JOB.format(**sizes), encoding="utf-8")
        command = [sys.executable, "-m", "resihp", "train", str(job)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout, done.stderr)
            return 1
        for log in sorted(Path(folder).glob("*/logs/rank*.log")):
            told = [line for line in log.read_text().splitlines() if "beats while" in line]
            print(f"{log.stem}: {told[-1] if told else 'no beats'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
