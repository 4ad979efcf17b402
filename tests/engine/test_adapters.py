"""The adapters of one engine, without a device: who waits, who runs, and what nobody needs any more."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.core.policies import StepView
from vllm.core.request import Request
from vllm.engine.adapters import Adapters
from vllm.step.messages import CoreRequest


class Reader:
    """An executor of one rank that has read each adapter when it is asked the first time."""

    def __init__(self) -> None:
        self.dropped: list[int] = []
        self.digest = "00"  # of all files
        self._read: list[int] = []

    def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if name == "begin_loading_adapter":
            self._read.append(args[0])
        if name == "drop_adapter":
            self.dropped.append(args[0])
        if name == "loaded_adapters":
            found, self._read = [[number, self.digest, None] for number in self._read], []
            return [found]
        return [None]


class Requests:
    """As much of a scheduler as adapters see."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.blocked: set[str] = set()

    def add(self, message: CoreRequest) -> Request:
        self.requests[message.request_id] = Request(message, 100, 1, len(self.requests))
        return self.requests[message.request_id]

    def block(self, request_id: str, reason: str) -> None:
        self.blocked.add(request_id)

    def unblock(self, request_id: str, reason: str) -> None:
        self.blocked.discard(request_id)


def message(number: int, adapter: int) -> CoreRequest:
    return CoreRequest(f"r{number}", [1], SamplingParams(), 0, lora_id=adapter, lora_path=f"/{adapter}")


def test_adapters_of_running_and_of_waiting_requests_are_told_apart() -> None:
    scheduler: Any = Requests()
    adapters = Adapters(Reader(), 1, 2)  # type: ignore[arg-type]
    first, second, other = message(0, 5), message(1, 5), message(2, 6)
    live = [scheduler.add(m) for m in (first, second, other)]
    adapters.want(first, scheduler)
    assert (adapters.waiting(), adapters.slots.running) == ([5], set())
    adapters.advance(scheduler)
    adapters.advance(scheduler)
    assert adapters.slots.admit(live[0], StepView([], 0, 0, 0)).name == "ADMIT"
    adapters.slots.admitted(live[0])
    assert (adapters.waiting(), adapters.slots.running) == ([], {5})
    adapters.want(second, scheduler)
    adapters.want(other, scheduler)
    assert (adapters.waiting(), adapters.slots.running) == ([5, 6], {5})
    adapters.slots.left(live[0])
    adapters.slots.forget(live[0])
    adapters.slots.forget(live[1])
    assert (adapters.waiting(), adapters.slots.running) == ([6], set())


def test_the_end_of_a_request_that_waited_frees_no_adapter_of_another() -> None:
    """Its adapter was counted for the other alone, so it must stay in host memory."""
    now = [0.0]
    reader, scheduler = Reader(), Requests()
    live: Any = scheduler
    adapters = Adapters(reader, 1, 1, clock=lambda: now[0])  # type: ignore[arg-type]
    running = scheduler.add(message(0, 5))
    adapters.want(message(0, 5), live)
    adapters.advance(live)
    adapters.advance(live)
    adapters.slots.admitted(running)
    scheduler.add(message(1, 6))
    adapters.want(message(1, 6), live)  # has no room
    now[0] = 5.0
    late = scheduler.add(message(2, 5))
    adapters.want(message(2, 5), live)
    assert scheduler.blocked == {"r1", "r2"}, "those that came late wait behind the one that has waited for long"
    adapters.slots.forget(late)
    adapters.advance(live)
    assert not reader.dropped
    adapters.slots.left(running)
    adapters.slots.forget(running)
    adapters.advance(live)
    assert reader.dropped == [5]


def read(adapters: Adapters, number: int) -> None:
    adapters.add(number, f"/{number}")
    while adapters.busy:
        adapters.advance(Requests())  # type: ignore[arg-type]


def run(adapters: Adapters, scheduler: Requests, number: int, adapter: int) -> Request:
    live = scheduler.add(message(number, adapter))
    adapters.want(message(number, adapter), scheduler)  # type: ignore[arg-type]
    while adapters.busy:
        adapters.advance(scheduler)  # type: ignore[arg-type]
    adapters.slots.admitted(live)
    return live


def end(adapters: Adapters, live: Request) -> None:
    adapters.slots.left(live)
    adapters.slots.forget(live)


def test_files_that_changed_while_an_adapter_was_on_the_device_only_are_copied_there_again() -> None:
    reader, scheduler = Reader(), Requests()
    adapters = Adapters(reader, 2, 1)  # type: ignore[arg-type]
    for digest, copied in (("00", 1), ("00", 0), ("11", 1)):
        reader.digest = digest
        end(adapters, run(adapters, scheduler, len(scheduler.requests), 5))
        assert [load.adapter_id for load in adapters.slots.loads()] == [5] * copied
        read(adapters, 6)  # in host memory there is room for one


def test_an_adapter_that_others_have_displaced_can_be_removed_and_its_number_used_again() -> None:
    reader, scheduler = Reader(), Requests()
    adapters = Adapters(reader, 2, 1)  # type: ignore[arg-type]
    end(adapters, run(adapters, scheduler, 0, 5))
    read(adapters, 6)
    assert adapters.ids() == [6] and adapters.slots.holds(5)
    assert adapters.remove(5) and not adapters.remove(5)
    assert not adapters.slots.holds(5)
    adapters.check(5, "/elsewhere")


def test_an_adapter_that_was_removed_and_is_still_used_holds_up_no_other() -> None:
    reader, scheduler = Reader(), Requests()
    adapters = Adapters(reader, 3, 3)  # type: ignore[arg-type]
    running = run(adapters, scheduler, 0, 5)
    assert adapters.remove(5)
    for late in (message(1, 5), message(2, 6)):
        scheduler.add(late)
        adapters.want(late, scheduler)  # type: ignore[arg-type]
    for _ in range(3):
        adapters.advance(scheduler)  # type: ignore[arg-type]
    assert scheduler.blocked == {"r1"} and adapters.ids() == [6]
    end(adapters, running)
    for _ in range(3):
        adapters.advance(scheduler)  # type: ignore[arg-type]
    assert not scheduler.blocked and adapters.ids() == [5, 6]


def test_an_adapter_that_was_displaced_as_soon_as_it_was_read_is_ready() -> None:
    """Others may need its room before anybody asks what became of it."""
    adapters, scheduler = Adapters(Reader(), 1, 1), Requests()  # type: ignore[arg-type]
    assert adapters.state(5) == "unknown"
    adapters.add(5, "/5")
    assert adapters.state(5) == "loading"
    read(adapters, 5)
    run(adapters, scheduler, 0, 6)
    assert adapters.ids() == [6] and adapters.state(5) == "ready"
    assert adapters.remove(5) and adapters.state(5) == "unknown"


class SlowReader(Reader):
    """Reads an adapter when it is let, or fails once it is told to drop it meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.ready = False
        self._stopped: list[int] = []

    def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if name == "begin_loading_adapter":
            self.begun.append(args[0])
        if name == "drop_adapter" and args[0] in self._read:
            self._read.remove(args[0])
            self._stopped.append(args[0])
        if name == "loaded_adapters":
            stopped, self._stopped = [[number, None, "not wanted"] for number in self._stopped], []
            if not self.ready:
                return [stopped]
            return [stopped + super().collective_rpc(name)[0]]
        return super().collective_rpc(name, args)


def test_an_adapter_that_is_removed_while_it_is_read_makes_way_at_once() -> None:
    reader, scheduler = SlowReader(), Requests()
    adapters, live = Adapters(reader, 2, 2), scheduler  # type: ignore[arg-type]
    adapters.add(5, "/5")
    adapters.add(6, "/6")
    adapters.add(7, "/7")
    adapters.advance(live)  # type: ignore[arg-type]
    assert reader.begun == [5]
    assert adapters.remove(5) and not adapters.remove(5) and adapters.remove(6)
    assert [adapters.state(number) for number in (5, 6, 7)] == ["unknown", "unknown", "loading"]
    adapters.check(5, "/elsewhere")
    adapters.advance(live)  # type: ignore[arg-type]
    assert reader.begun == [5, 7], "the one that was queued only is not read"
    reader.ready = True
    adapters.advance(live)  # type: ignore[arg-type]
    assert adapters.ids() == [7] and not adapters.busy


def test_an_adapter_that_is_added_again_while_its_reading_ends_is_read_anew() -> None:
    reader, scheduler = SlowReader(), Requests()
    adapters, live = Adapters(reader, 2, 2), scheduler  # type: ignore[arg-type]
    adapters.add(5, "/5")
    adapters.advance(live)  # type: ignore[arg-type]
    assert adapters.remove(5)
    adapters.add(5, "/other")
    assert adapters.state(5) == "loading"
    reader.ready = True
    adapters.advance(live)  # type: ignore[arg-type]
    adapters.advance(live)  # type: ignore[arg-type]
    assert reader.begun == [5, 5] and adapters.ids() == [5] and adapters.state(5) == "ready"


def test_an_adapter_that_is_removed_while_a_request_waits_for_it_goes_with_the_request() -> None:
    reader, scheduler = SlowReader(), Requests()
    adapters, live = Adapters(reader, 2, 2), scheduler  # type: ignore[arg-type]
    waiting = scheduler.add(message(0, 5))
    adapters.want(message(0, 5), live)  # type: ignore[arg-type]
    adapters.advance(live)  # type: ignore[arg-type]
    assert adapters.remove(5) and not adapters.remove(5)
    reader.ready = True
    adapters.advance(live)  # type: ignore[arg-type]
    assert not scheduler.blocked and not reader.dropped
    adapters.slots.admitted(waiting)
    end(adapters, waiting)
    assert reader.dropped == [5] and not adapters.ids() and adapters.state(5) == "unknown"
