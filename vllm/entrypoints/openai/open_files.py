"""How many connections the limit of open files leaves room for."""

from __future__ import annotations

from vllm.logger import init_logger

logger = init_logger(__name__)

# Files that the process has open besides its connections, generously.
OTHER_FILES = 100


def room_for_connections(wanted: int) -> int:
    """Raise this process's limit of open files, as far as it may, so that `wanted` connections fit.

    Returns how many do. One more would be closed by the event loop without a word, to the client or to the operator.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (ValueError, OSError):
        limit = soft
    room = min(wanted, max(limit - OTHER_FILES, limit // 2))
    if room < wanted:
        logger.warning(
            "This process may open %d files only, so it serves %d connections at once, not %d (--max-connections). "
            "Raise the limit: ulimit -n %d.",
            limit,
            room,
            wanted,
            needed,
        )
    return room
