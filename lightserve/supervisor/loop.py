"""`serve`: one server from its checks to its end, as an event loop without polling."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType, TracebackType
from typing import Self

from lightserve.channels import Waitable, ZmqHub, bind_hub, wait_readable
from lightserve.config import ServeConfig
from lightserve.config.fields import is_postgres
from lightserve.config.file import Origin, log_configuration
from lightserve.errors import ConfigError
from lightserve.extras import need_packages
from lightserve.http_access import read_api_keys, server_context
from lightserve.logs import one_line, setup_logging
from lightserve.messages.supervision import (
    LATE_TIMEOUT_S,
    ChildMessage,
    NodeOrder,
    NodeReport,
    SupervisorMessage,
)
from lightserve.node_key import read_node_key
from lightserve.supervisor.fleet import SILENCE_TIMEOUT_S, Fleet, Phase
from lightserve.supervisor.metrics import ServerMetrics
from lightserve.supervisor.metrics_listener import MetricsListener
from lightserve.supervisor.node import run_node
from lightserve.supervisor.nodes import Nodes
from lightserve.supervisor.spawn import CHILD_COMMAND, Child, RunDir, Spawner, SpecWriter
from lightserve.supervisor.startup import (
    bind_http_port,
    check_model,
    check_threads,
    listen,
    print_banner,
    resolve_model,
    take_store,
)

log = logging.getLogger(__name__)

# SIGTERM, SIGINT and SIGHUP: first as exceptions, then as events of the loop.


class Stopped(BaseException):
    """A stop signal arrived before the loop ran; whatever was under way is given up."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopSignals:
    """Context in which stop signals are caught; a signal that was ignored stays ignored.

    Until `defer` they raise `Stopped` at once, even out of a blocking download. After it they
    only make `fileno()` readable, and `take` returns them. With `reloads`, SIGHUP is no stop
    signal: it is never ignored, never raises, and one that comes early waits for `defer`.
    """

    def __init__(self, *, reloads: bool = False) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_deferred = False
        self._reloads = reloads
        self._has_early_reload = False
        self._old_handlers: dict[int, signal._HANDLER] = {}
        self._old_wakeup_fd = -1

    def __enter__(self) -> Self:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            is_wanted = signum == signal.SIGTERM or (signum == signal.SIGHUP and self._reloads)
            if is_wanted or signal.getsignal(signum) is not signal.SIG_IGN:
                self._old_handlers[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_deferred:
            signal.set_wakeup_fd(self._old_wakeup_fd)
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def fileno(self) -> int:
        """Return the descriptor that is readable when a signal has arrived."""
        return self._read_fd

    def defer(self) -> None:
        """From now on, signals are events."""
        self._old_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._is_deferred = True
        if self._has_early_reload:
            os.write(self._write_fd, bytes([signal.SIGHUP]))

    def take(self) -> list[int]:
        """Return the signals that have arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self._read_fd, 64) if number in self._old_handlers]
        return []

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self._is_deferred:
            return
        if signum == signal.SIGHUP and self._reloads:
            self._has_early_reload = True
            return
        raise Stopped(signum)


_LAST_WORDS_S = 5.0
"""Milliseconds, unless the machine is very busy; a reason is worth it."""


def serve(
    config: ServeConfig,
    *,
    origins: Mapping[str, Origin] = MappingProxyType({}),
    command: Sequence[str] = CHILD_COMMAND,
    silence_timeout_s: float = SILENCE_TIMEOUT_S,
    late_timeout_s: float = LATE_TIMEOUT_S,
) -> int:
    """Run a server until a signal ends it; returns the exit code.

    `origins` says, for the log, where values of `config` come from. `command` starts a child
    process (see `spawn`), which hangs when it is silent for `silence_timeout_s`, if it is busy for
    `late_timeout_s` (see `fleet`).
    Call from the main thread.

    Raises:
        ConfigError, ModelLoadError, StartupError: the server cannot start, or gave up.
    """
    setup_logging("supervisor", config.log_level, config.log_format)
    _forbid_core_dumps()
    with StopSignals(reloads=bool(config.api_key_file) and config.node_rank == 0) as signals:
        try:
            if config.node_rank:
                return _serve_node(config, origins, command, signals)
            new_fleet = partial(
                Fleet, silence_timeout_s=silence_timeout_s, late_timeout_s=late_timeout_s
            )
            return _serve(config, origins, command, new_fleet, signals)
        except Stopped as stop:
            return _exit_code_before_ready(stop.signum)


def _forbid_core_dumps() -> None:
    """Have none written of this process and of its children: they hold keys and prompts.

    With a limit of 1 byte the kernel gives none to a program that collects them either; one of 0
    is for files alone.
    """
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (1 if most else 0, most))


def _serve_node(
    config: ServeConfig, origins: Mapping[str, Origin], command: Sequence[str], signals: StopSignals
) -> int:
    """Run workers for node 0."""
    node_key = read_node_key(Path(config.node_key_file))
    check_threads(config)
    config = resolve_model(config)
    check_model(config)
    signals.defer()
    with closing(RunDir(config.run_dir)) as run_dir:
        log_configuration(log, config, origins)
        return run_node(config, run_dir, node_key, command, signals)


def _serve(
    config: ServeConfig,
    origins: Mapping[str, Origin],
    command: Sequence[str],
    new_fleet: Callable[..., Fleet],
    signals: StopSignals,
) -> int:
    api_keys = read_api_keys(Path(config.api_key_file)) if config.api_key_file else []
    node_key = read_node_key(Path(config.node_key_file)) if config.nnodes > 1 else b""
    if config.ssl_certfile:
        server_context(config.ssl_certfile, config.ssl_keyfile)
    if config.otlp_endpoint:
        need_packages(("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"), "otel")
    if config.allow_image_hosts:
        need_packages(("httpx",), "images")
    check_threads(config)
    with ExitStack() as stack:
        listener = stack.enter_context(bind_http_port(config))
        metrics_listener = None
        if config.metrics_port >= 0:
            metrics_listener = stack.enter_context(closing(MetricsListener(config)))
        config = resolve_model(config)
        check_model(config)
        if config.names_store and not is_postgres(config.batch_store):
            config = replace(config, batch_store=str(Path(config.batch_store).absolute()))
        store = take_store(config, stack)
        signals.defer()
        run_dir = stack.enter_context(closing(RunDir(config.run_dir)))
        control_address = run_dir.address("control")
        hub = stack.enter_context(
            closing(bind_hub(control_address, send_type=SupervisorMessage, recv_type=ChildMessage))
        )
        listen(listener, config)
        log_configuration(log, config, origins)
        nodes = stack.enter_context(Nodes(config, node_key)) if node_key else None
        specs = SpecWriter(
            *(config, run_dir, control_address, listener.fileno()),
            node_key=node_key,
            has_batches=store.is_needed,
            store_problem=store.problem,
        )
        metrics = ServerMetrics(config, api_keys)
        if metrics_listener is not None:
            metrics_listener.start(metrics)
            log.info("metrics on %s", metrics_listener.url)
        fleet = new_fleet(specs, Spawner(hub, command), metrics, nodes=nodes, api_keys=api_keys)
        stack.callback(fleet.kill_all)
        fleet.start()
        return _Loop(
            *(fleet, hub, signals, metrics), nodes=nodes, config=config, listener=listener
        ).run()


_AnyHub = ZmqHub[SupervisorMessage, ChildMessage] | ZmqHub[NodeOrder, NodeReport]


class _Loop:
    """Waits for messages, deaths, signals and deadlines, and hands them to the fleet."""

    def __init__(
        self,
        fleet: Fleet,
        hub: ZmqHub[SupervisorMessage, ChildMessage],
        signals: StopSignals,
        metrics: ServerMetrics,
        *,
        nodes: Nodes | None,
        config: ServeConfig,
        listener: socket.socket,
    ) -> None:
        self._fleet = fleet
        self._hub = hub
        self._signals = signals
        self._metrics = metrics
        self._hubs: list[_AnyHub] = [hub] if nodes is None else [hub, nodes.hub]
        self._config = config
        self._listener = listener

    def run(self) -> int:
        """Loop until the server has ended; returns the exit code."""
        fleet = self._fleet
        has_greeted = False
        while not fleet.is_drained:
            ready = set(self._wait())
            self._receive_messages()
            for child in fleet.children:
                if child.pidfd in ready:
                    self._hear_last_words(child)
                    fleet.on_exit(child)
            fleet.look_at_nodes(time.monotonic())
            fleet.check_deadlines(time.monotonic())
            num_rejected = sum(hub.num_rejected for hub in self._hubs)
            self._metrics.sample(fleet.children, num_rejected, time.monotonic())
            if self._metrics.wants_picture(time.monotonic()):
                fleet.ask_for_picture()
            if fleet.phase is Phase.SERVING and not has_greeted:
                has_greeted = True
                print_banner(self._config, self._listener.getsockname()[1])
            for signum in self._signals.take():
                if signum == signal.SIGHUP and self._config.api_key_file:
                    self._reload_api_keys()
                    continue
                if fleet.phase is Phase.STARTING:
                    return _exit_code_before_ready(signum)
                name = signal.Signals(signum).name
                if fleet.phase is Phase.DRAINING:
                    log.warning("%s once more: everything ends now", name)
                    return 128 + signum
                timeout_s = self._config.shutdown_timeout_s
                log.info("%s: requests in flight have %g s to finish", name, timeout_s)
                fleet.drain()
                # The last frontend that ends closes the port: clients that come later are refused,
                # which proxies take for what it is. Left open here, it would take connections that
                # nothing answers any more.
                self._listener.close()
        log.info("stopped")
        return 0

    def _reload_api_keys(self) -> None:
        """Read the file again; one that is wrong changes nothing."""
        try:
            keys = read_api_keys(Path(self._config.api_key_file))
        except ConfigError as error:
            log.error("API keys stay as they were: %s", one_line(error))
            return
        log.info("%d API keys read again", len(keys))
        self._fleet.set_api_keys(keys)
        self._metrics.keys = tuple(keys)

    def _wait(self) -> list[int]:
        """Sleep until something happens; returns the descriptors that are readable."""
        deadline_s = self._fleet.next_deadline_s
        timeout_s = None
        if deadline_s != float("inf"):
            timeout_s = max(0.0, deadline_s - time.monotonic())
        pidfds = [child.pidfd for child in self._fleet.children]
        sources: list[Waitable | int] = [*self._hubs, self._signals.fileno(), *pidfds]
        return [source for source in wait_readable(sources, timeout_s) if isinstance(source, int)]

    def _receive_messages(self) -> None:
        while (item := self._hub.receive(0.0)) is not None:
            self._fleet.on_message(*item)

    def _hear_last_words(self, child: Child) -> None:
        """Wait a moment for the ChildFailed that a failing child sends before it exits."""
        deadline_s = time.monotonic() + _LAST_WORDS_S
        while child.has_reported_failure and not child.failure:
            item = self._hub.receive(max(0.0, deadline_s - time.monotonic()))
            if item is None:
                return
            self._fleet.on_message(*item)


def _exit_code_before_ready(signum: int) -> int:
    """SIGTERM is an orderly end at any time; Ctrl-C of a start is reported as such."""
    return 128 + signum if signum == signal.SIGINT else 0
