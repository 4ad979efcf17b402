"""Processes that torchrun has started: each runs the whole program, and all give the answers of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.distributed.workload import answers, differences, engine
from tests.executor.test_pipeline import save

PROGRAM = """
import json, sys
from pathlib import Path
from tests.distributed.workload import answers, engine
llm = engine(Path(sys.argv[1]), tensor_parallel_size=2, distributed_executor_backend="external_launcher")
found = answers(llm, 8)
import os
Path(sys.argv[2], os.environ["RANK"]).write_text(json.dumps(found))
"""


def test_every_process_gives_the_answers_of_one(tmp_path: Path) -> None:
    folder = save("gpt2", tmp_path / "model")
    expected = json.loads(json.dumps(answers(engine(folder), 8)))  # keys become texts
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
         "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-backend", "c10d", program, folder, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert differences(json.loads((tmp_path / str(rank)).read_text()), expected) == []
