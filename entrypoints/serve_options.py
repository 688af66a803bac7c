"""ServeOptions: the settings of a server, from its command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from core.config import ModelConfig, StencilConfig
from core.ipc.logs import LogFormat
from entrypoints.api_keys import KeySource


@dataclass(frozen=True)
class ServeOptions:
    """Settings of the HTTP server, and the engine's StencilConfig."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # empty: no key is required
    key_source: KeySource = field(
        default_factory=lambda: KeySource((), (), {})
    )  # where api_keys come from, to read them again
    allowed_origins: tuple[str, ...] = ()  # of web pages other than the server's own
    allowed_hosts: tuple[str, ...] = ()  # in `Host` headers, besides the server's own
    rate_limit: int = 0  # requests per minute and caller; 0: no limit
    runtime_lora: bool = False  # whether callers may load adapters from files of this machine
    runtime_workflows: bool = False  # whether those with an admin key may register workflows
    admin_key_file: str = ""
    admin_keys: tuple[str, ...] = field(default=(), repr=False)  # that were in it
    workflow_files: tuple[str, ...] = ()  # files and folders of workflows
    playground: bool = True  # whether to serve the playground's pages
    comfy_api: bool = False  # whether to serve ComfyUI's API, too
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "text"
    config: StencilConfig = field(default_factory=StencilConfig)

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """At least one; the first is the default."""
        return self.config.engine.models
