"""Dockerfiles, manifests and scripts: they parse, name flags and files that exist, and refuse what they should."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils import FlexibleArgumentParser

ROOT = Path(__file__).parents[2]
MANIFESTS = ["kubernetes.yaml", "leader_worker_set.yaml", "kserve.yaml", "skypilot.yaml", "docker-compose.yaml"]
INSTRUCTIONS = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((ROOT / "examples" / name).read_text()))


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def lists(value: Any) -> Iterator[list[Any]]:
    """Arguments that are given one by one."""
    if isinstance(value, dict | list):
        if isinstance(value, list) and any(isinstance(item, str) and item.startswith("--") for item in value):
            yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from lists(item)


def commands(name: str) -> list[list[str]]:
    """The arguments of every `vllm serve` in a manifest."""
    found = []
    for document in documents(name):
        for text in strings(document):
            for part in re.split(r"&&|\n(?!\s)", text.replace("\\\n", " ")):
                words = shlex.split(part.strip().removeprefix("exec "))
                if words[:2] == ["vllm", "serve"]:
                    found.append(words[2:])
        found += [arguments for arguments in lists(document) if not arguments[0].startswith("-")]
    return found


def parsed(arguments: list[str]) -> Any:
    """What `vllm serve` makes of its arguments, of which the model is the first."""
    assert "/" in arguments[0] or arguments[0] == "4"
    return make_arg_parser(FlexibleArgumentParser()).parse_args(arguments[1:])


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_start_servers_with_flags_that_exist(name: str) -> None:
    found = commands(name)
    assert len(found) == 1
    words = [re.sub(r"\$\w+", "4", word) for word in found[0]]
    args = parsed(words)
    assert args.tensor_parallel_size in (2, 4, 8) and args.max_model_len in (None, 16384)


@pytest.mark.parametrize("name", MANIFESTS[:3])
def test_objects_of_kubernetes_have_what_every_object_has(name: str) -> None:
    for document in documents(name):
        assert {"apiVersion", "kind", "metadata", "spec"} <= set(document)
        assert document["metadata"]["name"] != "vllm"  # whose variables the engine would take for its own


def test_servers_listen_where_their_manifests_say() -> None:
    (kserve,) = documents("kserve.yaml")
    container = kserve["spec"]["predictor"]["containers"][0]
    port = container["ports"][0]["containerPort"]
    assert parsed(commands("kserve.yaml")[0]).port == port == container["readinessProbe"]["httpGet"]["port"]
    (compose,) = documents("docker-compose.yaml")
    service = compose["services"]["server"]
    args = parsed(commands("docker-compose.yaml")[0])
    assert service["ports"] == [f"{args.port}:{args.port}"]
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices["count"] == args.tensor_parallel_size
    assert {volume.partition(":")[0] for volume in service["volumes"]} == set(compose["volumes"])


def test_the_group_has_a_place_for_every_rank() -> None:
    group = documents("leader_worker_set.yaml")[0]["spec"]["leaderWorkerTemplate"]
    args = parsed(commands("leader_worker_set.yaml")[0])
    gpus = [
        int(group[template]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        for template in ("leaderTemplate", "workerTemplate")
    ]
    assert gpus[0] + gpus[1] * (group["size"] - 1) == args.tensor_parallel_size * args.pipeline_parallel_size
    assert args.tensor_parallel_size == gpus[0]


def test_a_server_that_a_shell_starts_takes_its_place() -> None:
    """Else the signal that a pod is to end reaches the shell, and requests in progress are cut."""
    leader = documents("leader_worker_set.yaml")[0]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
    assert "&& exec vllm serve" in leader["containers"][0]["args"][0]
    assert leader["terminationGracePeriodSeconds"] > parsed(commands("leader_worker_set.yaml")[0]).shutdown_timeout


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_dockerfiles_copy_what_the_build_needs(name: str) -> None:
    found = instructions(name)
    assert {instruction for instruction, _ in found} <= INSTRUCTIONS and found[0][0] == "ARG"
    stages = [words.split()[2] for instruction, words in found if instruction == "FROM"]
    copied = set()
    for instruction, words in found:
        if instruction == "COPY" and "--from" not in words:
            copied.update(words.split()[:-1])
        elif instruction == "COPY":
            assert re.search(r"--from=(\w+)", words)[1] in stages  # type: ignore[index]
    assert all((ROOT / path).exists() for path in copied)
    assert {"pyproject.toml", "setup.py", "csrc", "vllm", "tools", "README.md", "LICENSE"} <= copied
    entry = next(words for instruction, words in found if instruction == "ENTRYPOINT")
    words = yaml.safe_load(entry)
    assert words[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    make_arg_parser(FlexibleArgumentParser()).parse_args(words[3:])


def test_the_cluster_script_runs_one_container_and_removes_it(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >> {tmp_path}/calls\n')
    docker.chmod(0o755)
    script = ROOT / "examples/run_cluster.sh"
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", script, *arguments], env=env, capture_output=True, text=True, timeout=20)

    assert run("image", "10.0.0.1", "--worker", "/home/hf", "-e", "NCCL_SOCKET_IFNAME=eth0").returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "--network host" in calls[0] and "-e NCCL_SOCKET_IFNAME=eth0 image -c ray start --block" in calls[0]
    assert "--address=10.0.0.1:6379" in calls[0] and calls[-2:] == ["stop node", "rm node"]
    assert run("image", "10.0.0.1", "--head", "/home/hf").returncode == 0
    assert run("image", "10.0.0.1", "--boss", "/home/hf").returncode == 1
    short = run("image")
    assert short.returncode == 1 and "usage:" in short.stderr
