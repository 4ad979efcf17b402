import gc
import weakref

from vllm.utils.collector import collector_paused, what_exists_frozen


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_old_cycles_outlive_the_block_and_new_ones_do_not() -> None:
    gc.collect()
    old = Node()
    gone = weakref.ref(old)
    with what_exists_frozen():
        assert gc.get_freeze_count()
        del old
        gc.collect()
        assert gone() is not None
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None
    assert not gc.get_freeze_count()
    gc.collect()
    assert gone() is None


def test_what_a_process_froze_for_itself_stays_frozen() -> None:
    gc.freeze()
    try:
        with what_exists_frozen():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_the_collector_is_on_again_after_a_pause_also_after_an_error() -> None:
    try:
        with collector_paused():
            assert not gc.isenabled()
            raise ValueError
    except ValueError:
        assert gc.isenabled()
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()
    gc.enable()
