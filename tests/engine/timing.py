"""How long each connector hook kept the engine's thread, hook by hook."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["SCHEDULER_HOOKS", "WORKER_HOOKS", "HookTimes", "time_hooks"]

HookTimes = dict[str, list[float]]

SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "has_pending_block_frees",
    "take_events",
    "get_kv_connector_stats",
    "reset_cache",
)

WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "finish_forward",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


def time_hooks(connector: Any, names: Iterable[str], times: HookTimes) -> None:
    """Replace hooks of one connector object by twins that note their duration."""
    for name in names:
        hook = getattr(connector, name, None)
        if hook is not None:
            setattr(connector, name, _timed(hook, times.setdefault(name, [])))


def _timed(hook: Callable[..., Any], durations: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        try:
            return hook(*args, **kwargs)
        finally:
            durations.append(perf_counter() - start)

    return timed
