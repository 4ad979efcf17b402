"""The parts of the Ray executor that need no cluster."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.executor.configs import config_for
from vllm.config import ParallelConfig
from vllm.engine import ray_core
from vllm.exceptions import EngineDeadError
from vllm.executor import executor_class, ray_nodes, ray_utils
from vllm.executor.base import Executor
from vllm.executor.ray_actor import versions
from vllm.executor.ray_executor import RemoteRank, View, views_of
from vllm.executor.ray_nodes import accept, carried_environment, check_model, check_versions, open_port
from vllm.executor.ray_utils import order_of_bundles, usable_bundles
from vllm.executor.uniproc import UniprocExecutor
from vllm.ipc.listeners import open_listener

SECRET = b"s" * 32


def call(port: int, greeting: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(greeting)
    return connection


def test_only_who_knows_the_secret_is_a_rank() -> None:
    with open_listener() as listener:
        port = listener.getsockname()[1]
        strangers = [call(port, b"x" * 32 + (1).to_bytes(4, "little")), call(port, SECRET[:9])]
        strangers[1].shutdown(socket.SHUT_WR)
        ranks = [call(port, SECRET + number.to_bytes(4, "little")) for number in (2, 1)]
        twice = call(port, SECRET + (2).to_bytes(4, "little"))
        last = call(port, SECRET + (3).to_bytes(4, "little"))
        found = accept(listener, SECRET, 3, time.monotonic() + 5)
        assert sorted(found) == [1, 2, 3]
        for stranger in (*strangers, twice):
            assert stranger.recv(1) == b""
        found[1].sendall(b"hello")
        assert ranks[1].recv(5) == b"hello"
        for connection in (*strangers, *ranks, twice, last, *found.values()):
            connection.close()


def test_ranks_that_do_not_come_are_named() -> None:
    with (
        open_listener() as listener,
        pytest.raises(EngineDeadError, match=r"1 of 1 ranks have not connected to 127\.0\.0\.1"),
    ):
        accept(listener, SECRET, 1, time.monotonic() + 0.05)


def test_strangers_who_say_nothing_hold_up_no_rank() -> None:
    """However many, and whether they came before it or not."""
    with open_listener() as listener:
        port = listener.getsockname()[1]
        silent = [call(port, SECRET[: i % 9]) for i in range(100)]
        rank = call(port, SECRET[:20])
        threading.Timer(0.2, lambda: rank.sendall(SECRET[20:] + (1).to_bytes(4, "little"))).start()
        found = accept(listener, SECRET, 1, time.monotonic() + 5)  # each was once waited for this long
        assert sorted(found) == [1] and found[1].gettimeout() is None
        assert all(stranger.recv(1) == b"" for stranger in silent)
        for connection in (*silent, rank, *found.values()):
            connection.close()


def test_only_so_many_strangers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_nodes, "MOST_SILENT", 3)
    with open_listener() as listener:
        port = listener.getsockname()[1]
        silent = [call(port, b"") for _ in range(9)]
        late = threading.Timer(0.3, lambda: silent.append(call(port, SECRET + (1).to_bytes(4, "little"))))
        late.start()
        gone = []
        threading.Timer(0.2, lambda: gone.append([_has_ended(stranger) for stranger in silent])).start()
        found = accept(listener, SECRET, 1, time.monotonic() + 5)
        assert sorted(found) == [1] and gone == [[True] * 6 + [False] * 3]
        late.join()
        for connection in (*silent, *found.values()):
            connection.close()


def _has_ended(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def test_strangers_who_keep_coming_do_not_put_off_the_deadline() -> None:
    done = threading.Event()
    with open_listener() as listener:
        port = listener.getsockname()[1]

        def come_and_go() -> None:
            while not done.is_set():
                call(port, b"x").close()
                time.sleep(0.005)

        strangers = threading.Thread(target=come_and_go)
        strangers.start()
        try:
            with pytest.raises(EngineDeadError, match="1 of 1 ranks have not connected"):
                accept(listener, SECRET, 1, time.monotonic() + 0.3)
        finally:
            done.set()
            strangers.join()


def test_a_rank_that_was_killed_is_known_from_one_that_failed() -> None:
    def gone() -> None:
        raise ConnectionError

    for status, killed in ((lambda: -9, True), (lambda: 1, False), (gone, True)):
        here, there = socket.socketpair()
        with here, there:
            rank = RemoteRank(3, here, 77, "10.0.0.2", status)
            assert rank.is_alive and not rank.was_killed
            there.close()
            assert not rank.is_alive and rank.was_killed is killed


def test_ranks_of_one_node_are_neighbours_and_the_drivers_come_first() -> None:
    nodes = {0: "b", 1: "a", 2: "b", 3: "a", 4: "c"}
    assert order_of_bundles(nodes, "b", range(5)) == [0, 2, 1, 3, 4]
    assert order_of_bundles(nodes, "c", [1, 2, 4]) == [4, 1, 2]


def test_engines_that_share_a_placement_group_name_their_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    group = [{"GPU": 1.0}, {"CPU": 4.0}, {"GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}]
    nodes = dict.fromkeys(range(5), "a")
    assert order_of_bundles(nodes, "a", usable_bundles(group, "GPU", 2)) == [0, 2, 3, 4]
    monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", "4, 3")
    assert order_of_bundles(nodes, "a", usable_bundles(group, "GPU", 2)) == [4, 3]
    for wrong in ("3", "3,3", "1,3", "4,5"):
        monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", wrong)
        with pytest.raises(ValueError, match=r"a bundle for each of the 2 ranks, got .* a GPU are \[0, 2, 3, 4\]"):
            usable_bundles(group, "GPU", 2)


def test_keys_stay_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    carried = carried_environment()
    assert carried["NCCL_SOCKET_IFNAME"] == "eth1" and carried["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert "secret" not in carried.values() and "PYTHONPATH" in carried


def test_nodes_with_other_versions_are_refused() -> None:
    check_versions([{"address": "10.0.0.1", "versions": versions()}])
    with pytest.raises(ValueError, match=r"node 10\.0\.0\.2 has torch 1\.0, but all must have"):
        check_versions([{"address": "10.0.0.2", "versions": {**versions(), "torch": "1.0"}}])


def test_ranks_of_a_node_number_its_gpus_alike() -> None:
    """Also where the process of the first rank sees some of the node's only."""
    assert views_of(["a", "a"], [["3"], ["1"]], None) == [View("0,1,2,3", 3), View("0,1,2,3", 1)]
    assert views_of(["a", "a"], [["5"], ["2"]], "2, 5,7") == [View("2,5,7", 1), View("2,5,7", 0)]
    names = [["GPU-x"], ["GPU-y"]]
    assert views_of(["a", "a"], names, "GPU-y,GPU-x") == [View("GPU-y,GPU-x", 1), View("GPU-y,GPU-x", 0)]
    views = views_of(["a", "b", "b"], [["0"], ["6"], ["4"]], None)
    assert views == [View("0", 0), View("6,4", 0), View("6,4", 1)]


def test_ranks_see_what_ray_shows_them_where_the_first_one_cannot_see_theirs() -> None:
    assert views_of(["a", "a"], [["1"], ["2"]], "0") == [View(), View()]
    assert views_of(["a", "a"], [["1"], ["2"]], "0,1") == [View(None, 1), View()]
    assert views_of(["a", "a"], [["GPU-x"], ["GPU-y"]], None) == [View(), View()]
    assert views_of(["a", "a"], [[], []], None) == [View(), View()]


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_listener() as taken:
        first = taken.getsockname()[1]
        monkeypatch.setenv("VLLM_PORT", str(first))
        with open_port("127.0.0.1") as one, open_port("127.0.0.1") as other:  # of two engines that start at once
            assert first < one.getsockname()[1] < other.getsockname()[1] < first + 200


@pytest.mark.parametrize("port", [None, "6000"])
@pytest.mark.parametrize("address", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_host_is_refused(address: str, port: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if port is not None:
        monkeypatch.setenv("VLLM_PORT", port)
    with pytest.raises(ValueError, match=rf"{address} is not an address of this host.*VLLM_HOST_IP sets the address"):
        open_port(address)


def test_a_class_of_the_users_own() -> None:
    assert executor_class("vllm.executor.uniproc:UniprocExecutor") is UniprocExecutor
    config = ParallelConfig(distributed_executor_backend="vllm.executor.uniproc:UniprocExecutor")
    assert ":" in config.distributed_executor_backend
    with pytest.raises(ValueError, match="cannot be imported"):
        executor_class("nowhere:Nothing")
    with pytest.raises(ValueError, match=r"It lacks submit, collect, shutdown, check_health\(\)"):
        executor_class("threading:Thread")
    assert threading and os and Executor


def test_a_node_without_the_model_is_named() -> None:
    nodes = [{"address": f"10.0.0.{i}", "has_model": i != 2} for i in (1, 2, 3, 2)]
    with pytest.raises(ValueError, match=r"folder /models/m is not on 10\.0\.0\.2\. All nodes need the model"):
        check_model(nodes, "/models/m")
    check_model(nodes[:1], "/models/m")


class _NoPlace:
    """Of a cluster and an actor as much as waiting for a place takes."""

    def __init__(self, turns: int) -> None:
        self.turns, self.describe, self.remote = turns, self, lambda model: "asked"

    def wait(self, asked: list[str], timeout: float) -> tuple[list[str], list[str]]:
        self.turns -= 1
        return ([], asked) if self.turns >= 0 else (asked, [])

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def get(self, calls: list[str], timeout: float) -> list[dict[str, str]]:
        return [{"address": "10.0.0.1"}]


def test_a_copy_that_waits_for_a_place_says_so(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_for(model_folder, data_parallel_size=2, data_parallel_backend="ray")
    caplog.clear()
    core = ray_core.RayCore(1, config, 10.0, 10.0)
    cluster = core._actor = _NoPlace(2)
    assert core._placed(cluster) == {"address": "10.0.0.1"}
    waits = "Waiting for a node with 1 free CPUs for replica 1; of the Ray cluster's CPUs 1 are free now."
    assert [record.getMessage() for record in caplog.records] == [waits] * 2
    monkeypatch.setattr(ray_core, "START_S", 0.0)
    cluster.turns = 2
    with pytest.raises(EngineDeadError, match="There was no place for 0 s: a node with 1 free CPUs for replica 1"):
        core._placed(cluster)


class Ray:
    """Of the module as much as connecting takes."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def is_initialized(self) -> bool:
        return False

    class _raylet:  # noqa: N801 - as Ray calls it
        code = 0

        @classmethod
        def GcsClient(cls, address: str) -> None:
            if cls.code:
                error = RuntimeError("Method not found!")
                error.rpc_code = cls.code  # type: ignore[attr-defined]
                raise error

    def init(self, address: str | None = None, **options: object) -> None:
        self.asked.append(address)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setattr(ray_utils, "_REACH_S", 0.2)
    return made


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None], ids=["http", "end", "silence"])
def test_what_answers_where_ray_is_said_to_be_must_be_ray(
    ray: Ray, answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_listener() as listener, ThreadPoolExecutor(1) as pool:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{listener.getsockname()[1]}")
        over = threading.Event()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                if answer is None:
                    over.wait()
                else:
                    connection.sendall(answer)

        pool.submit(serve)
        try:
            with pytest.raises(ValueError, match=r"There is no Ray cluster at RAY_ADDRESS=127\.0\.0\.1:\d+: .*Without"):
                ray_utils.connect()
        finally:
            over.set()
    assert not ray.asked


def test_an_address_of_ray_must_be_one_that_somebody_listens_at(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_listener() as listener:
        free = f"127.0.0.1:{listener.getsockname()[1]}"
    for address in (free, "head", "head:x", ":6379", "127.0.0.1:99999", f"ray://{free}"):
        with pytest.raises(ValueError, match=f"no Ray cluster at ray_address={address}: "):
            ray_utils.connect(address)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert not ray.asked and ray_utils.connect() and ray.asked == ["auto"]


@pytest.mark.parametrize("code", [0, 12, 16])
def test_ray_is_asked_where_it_answers(ray: Ray, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another service of gRPC (12: it does not know the call) is told from one that refuses (16: without a token)."""
    monkeypatch.setattr(Ray._raylet, "code", code)
    with open_listener() as listener, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
                connection.recv(100)

        pool.submit(serve)
        if code == 12:
            with pytest.raises(ValueError, match=f"no Ray cluster at ray_address={address}: what answers there is not"):
                ray_utils.connect(address)
        else:
            assert ray_utils.connect(address) and ray.asked == [address]
