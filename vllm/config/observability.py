"""Settings of statistics, metrics and traces."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config.fields import setting
from vllm.config.kinds import Flag, Text

DETAILED_TRACE_MODULES = ("model", "worker", "all")


@dataclass(frozen=True)
class ObservabilityConfig:
    """What the engine says about itself."""

    disable_log_stats: bool = setting(False, Flag(), "Log no statistics.")
    show_hidden_metrics_for_version: str | None = setting(
        None,
        Text(optional=True),
        "Show metrics that were hidden since this version.",
        obsolete="no metric is hidden",
    )
    otlp_traces_endpoint: str | None = setting(
        None, Text(optional=True), "URL that OpenTelemetry traces are sent to.", later="OpenTelemetry traces"
    )
    collect_detailed_traces: str | None = setting(
        None,
        Text(optional=True),
        "Modules to trace in detail, separated by commas: model, worker or all. Needs otlp_traces_endpoint.",
        later="Detailed traces",
    )

    def __post_init__(self) -> None:
        for module in (self.collect_detailed_traces or "").split(","):
            if module and module not in DETAILED_TRACE_MODULES:
                raise ValueError(
                    f"Invalid module {module} in collect_detailed_traces. Valid modules are {DETAILED_TRACE_MODULES}"
                )


@dataclass(frozen=True)
class RequestLogSettings:
    """What an engine in the background logs (AsyncEngineArgs)."""

    disable_log_requests: bool = setting(False, Flag(), "Do not log requests.")
    enable_log_requests: bool | None = setting(
        None, Flag(optional=True), "Log requests: the newer, opposite name of disable_log_requests. Default: on."
    )
    engine_use_ray: bool = setting(False, Flag(), "Run the engine in a Ray process.", later="Ray")
