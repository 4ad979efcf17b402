"""Tests published clients and integrations, each in an environment of its own, against one server with the demo model.

    python -m tools.client_tests [NAME ...] [-- PYTEST ARGUMENTS]

An environment lies in .venv-clients/NAME, over the one that runs this file: a client brings what it needs, in versions
of its own, and what it does not bring is ours. Nothing is installed again while a client's requirements stay the same.
`tests/clients/test_NAME.py` is run with it; VLLM_TEST_SERVER says where the server is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
START_SECONDS = 120.0
SERVER = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--port", "0"]
# name -> what is installed, newest first within these ranges.
CLIENTS = {
    "openai": ["openai>=1.100"],
    "anthropic": ["anthropic>=0.60"],
    "litellm": ["litellm>=1.70", "mcp>=1"],
    "langchain": ["langchain-openai>=0.3", "langchain-community>=0.3"],
    "llama_index": ["llama-index-llms-openai-like>=0.4", "llama-index-llms-vllm>=0.5"],
    "instructor": ["instructor>=1.8"],
    "outlines": ["outlines>=1.1", "openai>=1.100"],
    "dspy": ["dspy>=2.6"],
    "lm_eval": ["lm_eval[api,hf]>=0.4.9"],
    "guidellm": ["guidellm>=0.8"],
    "inspect_ai": ["inspect-ai>=0.3.100", "openai>=1.100"],
    "gradio": ["gradio>=5", "gradio_client>=1"],
    "ray": ["ray[data]>=2.40"],
}


def environment(name: str) -> Path:
    """The interpreter of a client's environment, which has what the client wants."""
    folder = ENVIRONMENTS / name
    python, stamp = folder / "bin" / "python", folder / ".ready"
    wanted = "\n".join([sys.version, *CLIENTS[name]])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"{name}: installing {', '.join(CLIENTS[name])}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Behind its own packages stand those of the environment below, and then this checkout.
    (packages / "below.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *CLIENTS[name]], check=True)
    stamp.write_text(wanted, encoding="utf-8")
    return python


class Server:
    """`vllm serve demo` on a free port."""

    def __enter__(self) -> str:
        self._log = tempfile.NamedTemporaryFile("w+", prefix="server-", suffix=".log")  # noqa: SIM115 - until __exit__
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "demo", *SERVER]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            text = Path(self._log.name).read_text(encoding="utf-8")
            found = re.search(r"Uvicorn running on http://[^:]+:(\d+)", text)
            if found:
                return f"http://127.0.0.1:{found[1]}"
            time.sleep(0.1)
        self.__exit__()
        raise RuntimeError(f"The server did not start:\n{text}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


def main() -> int:
    names, arguments = sys.argv[1:], []
    if "--" in names:
        cut = names.index("--")
        names, arguments = names[:cut], names[cut + 1 :]
    unknown = set(names) - set(CLIENTS)
    if unknown:
        print(f"No such client: {', '.join(sorted(unknown))}. There are: {', '.join(CLIENTS)}.", file=sys.stderr)
        return 2
    results: dict[str, str] = {}
    with Server() as url:
        for name in names or CLIENTS:
            try:
                python = environment(name)
            except subprocess.CalledProcessError:
                results[name] = "could not be installed"
                continue
            command = [str(python), "-m", "pytest", "-q", "-m", "clients", "-p", "no:cacheprovider"]
            command += [f"tests/clients/test_{name}.py", *arguments]
            tested = subprocess.run(command, cwd=ROOT, env={**os.environ, "VLLM_TEST_SERVER": url})
            results[name] = "passed" if tested.returncode == 0 else f"failed ({tested.returncode})"
    for name, result in results.items():
        print(f"{name}: {result}")
    good = sum(result == "passed" for result in results.values())
    print(f"{good} of {len(results)} clients work with this server.")
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
