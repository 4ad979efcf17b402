"""Answers that are made for at most a share of the time, however many ask."""

import asyncio

import pytest

from vllm.entrypoints.openai.paced import SHARE, Paced


def test_who_waits_shares_what_is_made_next_and_nobody_gets_what_was_made_before():
    made = 0

    async def make() -> bytes:
        nonlocal made
        made += 1
        await asyncio.sleep(0.02)
        return str(made).encode()

    async def main() -> None:
        paced = Paced(make)
        assert await paced.get() == b"1"
        begin = asyncio.get_running_loop().time()
        first, *others = await asyncio.gather(*(paced.get() for _ in range(50)))
        waited = asyncio.get_running_loop().time() - begin
        assert first == b"2" and set(others) == {b"2"}
        assert waited > 0.02 / SHARE * 0.8
        waiting = asyncio.ensure_future(paced.get())
        while made < 3:
            await asyncio.sleep(0.001)
        late = asyncio.ensure_future(paced.get())  # asks while the third is made, which may lack what it knows of
        assert await waiting == b"3" and await late == b"4"

    asyncio.run(main())


def test_an_error_reaches_all_who_wait_and_who_gives_up_takes_nothing_from_others():
    results = [b"a", ValueError("no"), b"b"]

    async def make() -> bytes:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def main() -> None:
        paced = Paced(make)
        gone = asyncio.ensure_future(paced.get())
        stays = asyncio.ensure_future(paced.get())
        await asyncio.sleep(0)
        gone.cancel()
        assert await stays == b"a"
        found = await asyncio.gather(paced.get(), paced.get(), return_exceptions=True)
        assert [type(error) for error in found] == [ValueError, ValueError]
        assert await paced.get() == b"b"
        with pytest.raises(asyncio.CancelledError):
            await gone

    asyncio.run(main())
